"""`olmo-hf push` against a Hub on the loopback."""

import json
import os
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

from olmo_hf.cli.main import main
from olmo_hf.training import commit
from olmo_hf.training.settling import describe_files
from tests import hub_stub
from tests.model.tiny import tiny_model

SECRET = "hf_secret_of_the_test"


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "run"
    checkpoint = directory / "checkpoint-30"
    tiny_model().save_pretrained(checkpoint)
    (checkpoint / "optimizer.safetensors").write_bytes(b"state of the run")
    (checkpoint / "tokenizer.json").write_text("{}")
    names = sorted(path.name for path in checkpoint.iterdir())
    manifest = commit.Manifest(
        kind="unsharded",
        step=30,
        tokens=7680,
        world_size=1,
        files=describe_files(checkpoint, names),
        versions={"torch": "2.13.0"},
    )
    commit.write_json(checkpoint / commit.MANIFEST, vars(manifest))
    (directory / "latest").symlink_to("checkpoint-30")
    (directory / "config.yaml").write_text("data:\n  paths: [a.npy]\ntraining:\n  learning_rate: 4e-4\n")
    rows = [{"step": step, "train/CrossEntropyLoss": 3.0 - step / 100} for step in (10, 20, 30, 40)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_dry_run_shows_card_and_files(run_dir, capsys):
    assert main(["push", str(run_dir), "someone/model", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "| train/CrossEntropyLoss | 2.7 |" in said, "the value at the checkpoint's step, not a later one"
    assert "- `a.npy`" in said
    assert "model.safetensors" in said
    assert "tokenizer.json" in said
    assert "optimizer.safetensors" not in said


def test_a_damaged_or_sharded_checkpoint_is_not_published(run_dir, capsys):
    weights = run_dir / "checkpoint-30" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert main(["push", str(run_dir), "someone/model", "--dry-run"]) == 2
    assert "damaged" in capsys.readouterr().err
    weights.unlink()
    assert main(["push", str(run_dir), "someone/model", "--dry-run"]) == 2
    assert "olmo-hf convert" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached(run_dir, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert main(["push", str(run_dir), "someone/model"]) == 2
    said = capsys.readouterr().err
    assert "someone/model: cannot upload (" in said
    assert "check the name, the connection and `hf auth login`" in said


def test_upload(run_dir, tmp_path):
    with hub_stub.running() as hub:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": SECRET,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        command = [sys.executable, "-m", "olmo_hf.cli.main", "push", str(run_dir), "someone/model"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        files = hub.repositories["someone/model"].files
        assert set(files) == {
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        }
        assert b"| train/CrossEntropyLoss | 2.7 |" in files["README.md"]
        assert hub.tokens == {SECRET}
        refused = subprocess.run(
            [*command[:-1], "a/b/c"], capture_output=True, text=True, env=environment, check=False
        )
        assert refused.returncode == 2
        assert "cannot upload" in refused.stderr
    assert SECRET not in done.stdout + done.stderr + refused.stdout + refused.stderr


@pytest.fixture
def soup(tmp_path):
    """An average of two checkpoints of one run."""
    directory = tmp_path / "other_run"
    for step in (10, 20):
        tiny_model().save_pretrained(directory / f"checkpoint-{step}")
    (directory / "config.yaml").write_text("data:\n  paths: [a.npy]\ntraining:\n  learning_rate: 4e-4\n")
    assert main(["average", *map(str, directory.glob("checkpoint-*")), "-o", str(tmp_path / "soup")]) == 0
    return tmp_path / "soup"


def test_an_average_keeps_its_card_and_its_lineage(soup, capsys):
    capsys.readouterr()
    assert main(["push", str(soup), "someone/soup", "--dry-run", "--license", "apache-2.0"]) == 0
    said = capsys.readouterr().out
    lineage = json.loads((soup / "lineage.json").read_text())
    assert "lineage.json" in said
    assert all(one["weights_sha256"] in said for one in lineage["ingredients"])
    assert 'from_pretrained("someone/soup"' in said, "the name it has from now on"
    assert "- `a.npy`" in said, "what the ingredients were trained on"
    assert "| learning_rate | 0.0004 |" in said
    assert ModelCard(said).data.license == "apache-2.0"
    assert "merge" in ModelCard(said).data.tags
    assert "\n## Metrics\n\nNone were recorded.\n\n## License\n\napache-2.0\n" in said
    sections = [line for line in said.splitlines() if line.startswith("## ")]
    assert sections == ["## Training data", "## Recipe", "## Lineage", "## Metrics", "## License"]


def test_sections_that_an_average_has_already_are_not_written_twice(soup, capsys):
    card = soup / "README.md"
    card.write_text(card.read_text() + "\n## Metrics\n\nMeasured by hand.\n")
    capsys.readouterr()
    assert main(["push", str(soup), "someone/soup", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("## Metrics\n") == 1
    assert "Measured by hand." in said
    assert "## License\n\nNot stated." in said


def test_a_card_that_somebody_wrote_is_kept_unless_asked(run_dir, capsys):
    checkpoint = run_dir / "checkpoint-30"
    (checkpoint / "README.md").write_text("---\ntags: [mine]\n---\n\n# Written by hand\n")
    assert main(["push", str(run_dir), "someone/model", "--dry-run"]) == 0
    card = capsys.readouterr().out
    assert "# Written by hand" in card
    assert ModelCard(card).data.license is None
    assert main(["push", str(run_dir), "someone/model", "--dry-run", "--new-card", "--license", "mit"]) == 0
    card = capsys.readouterr().out
    assert "Written by hand" not in card
    assert ModelCard(card).data.license == "mit"
    (checkpoint / "README.md").write_text("---\n[\n---\n")
    assert main(["push", str(run_dir), "someone/model", "--dry-run"]) == 2
    assert "--new-card" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Apache 2", "mit\nbase_model: x", ""])
def test_a_license_that_is_no_identifier(run_dir, capsys, name):
    assert main(["push", str(run_dir), "someone/model", "--dry-run", "--license", name]) == 2
    assert "--license" in capsys.readouterr().err


def test_damaged_settings_of_the_run(run_dir, capsys):
    (run_dir / "config.yaml").write_text("data: [")
    assert main(["push", str(run_dir), "someone/model", "--dry-run"]) == 2
    assert "config.yaml" in capsys.readouterr().err
