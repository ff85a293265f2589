"""`olmo-hf ladder`: its files, and the law of three real tiny runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.cli.main import main
from olmo_hf.config_file import load_run
from olmo_hf.model.build import build_config
from olmo_hf.model.size import count_parameters
from tests.recipes.test_ladder import PUBLISHED

ROOT = Path(__file__).parent.parent.parent


def test_the_files_load_and_say_the_same(tmp_path, capsys):
    words = ["ladder", "configs", "--sizes", "4M", "150m", "7B", "--multiples", "0.5", "10", "-o", str(tmp_path)]
    assert main(words) == 0
    table = capsys.readouterr().out
    files = sorted(tmp_path.glob("*.yaml"))
    assert len(files) == 6
    for file in files:
        run = load_run(file)
        assert f"train_hf.py {file}" in file.read_text()
        launch_file = "fsdp2_shard_grad_op.yaml" if "-7b-" in file.name else "ddp.yaml"
        assert f"--config_file accelerate_configs/{launch_file} " in file.read_text()
        assert run.name.removeprefix("ladder-") in table
        assert run.training.scheduler.warmup * 20 * (10 if "10xC" in run.name else 0.5) == pytest.approx(
            float(run.training.max_duration.removesuffix("T")), abs=1
        )
        size = run.name.split("-")[1]
        count = count_parameters(build_config(run.model, max_position_embeddings=2048))
        assert count.non_embedding == PUBLISHED[size] == run.training.scheduler.warmup
    assert main(words) == 2
    assert "exist" in capsys.readouterr().err
    assert main([*words, "--force", "--launch-file", "hsdp.yaml"]) == 0
    assert all("accelerate_configs/hsdp.yaml " in file.read_text() for file in files)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sizes", "151M"], "expected one of 4M"),
        (["--sizes", "65x2x4"], "even multiple"),
        (["--sizes", "0x2x4"], "even multiple"),
        (["--multiples", "0.05"], "more than 0.05"),
        (["--multiples", "nan"], "more than 0.05"),
        (["--multiples", "inf"], "more than 0.05"),
        (["--batch-multiple", "0"], "--batch-multiple"),
        (["--base", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_what_cannot_be_is_refused(words, said, capsys):
    assert main(["ladder", "configs", *words]) == 2
    assert said in capsys.readouterr().err


def base_on_this_machine(directory: Path) -> Path:
    """Text of a second-order chain over 64 ids, so that there is something to learn: each id depends on the last."""
    random = np.random.default_rng(0)
    following = np.array([random.permutation(64)[:4] for _ in range(64)])
    tokens = np.zeros(400_000, dtype=np.uint16)
    choices = random.integers(0, 4, len(tokens))
    for place in range(1, len(tokens)):
        tokens[place] = following[tokens[place - 1], choices[place]]
    tokens.tofile(directory / "a.npy")
    base = directory / "base.yaml"
    base.write_text(
        "name: small\n"
        "model: {config: {vocab_size: 64, hidden_size: 8, num_attention_heads: 1, num_hidden_layers: 1, "
        "intermediate_size: 16, eos_token_id: 0, pad_token_id: 0, max_position_embeddings: 32}}\n"
        "data: {paths: [a.npy], token_dtype: uint16, sequence_length: 32}\n"
        "training: {per_device_train_batch_size: 16, global_train_batch_size: 16, max_duration: 1, "
        "save_at_start: false, save_interval: null}\n"
        "evaluation: {evaluators: [{label: same, max_instances: 64, data: {paths: [a.npy], token_dtype: uint16, "
        "sequence_length: 32}}]}\n"
    )
    return base


def launch(directory: Path, *words: str) -> None:
    command = [sys.executable, str(ROOT / "train_hf.py"), *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=directory)
    assert found.returncode == 0, found.stderr


@pytest.mark.takes(26, "three runs that really train, launched one after another: fewer points draw no curve")
def test_three_real_runs_are_fitted_and_drawn(tmp_path, capsys, monkeypatch):
    """From the ladder's own files to its picture: larger and longer runs end lower, and the law goes through them."""
    base_on_this_machine(tmp_path)
    monkeypatch.chdir(tmp_path)
    sizes = ["8x1x2", "12x1x2", "16x2x2"]
    words = ["ladder", "configs", "--sizes", *sizes, "--multiples", "1", "--batch-multiple", "16"]
    assert main([*words, "--base", "base.yaml", "-o", "ladder"]) == 0
    for file in sorted(Path("ladder").glob("*.yaml")):
        launch(tmp_path, str(file))
    capsys.readouterr()
    runs = [f"runs/small-{size}-1xC" for size in sizes]
    assert main(["ladder", "fit", *runs, "-o", "out", "--predict", "1e5,2e6"]) == 0
    said = capsys.readouterr().out
    assert "a law of compute" in said
    assert "foretold for N 100,000  D 2,000,000" in said
    record = json.loads(Path("out/scaling.json").read_text())
    by_name = {row["name"]: row for row in record["runs"]}
    losses = [by_name[Path(run).name]["loss"] for run in runs]
    assert losses == sorted(losses, reverse=True)
    for run, size in zip(runs, sizes, strict=True):
        row, settings = by_name[Path(run).name], load_run(Path("ladder") / f"small-{size}-1xc.yaml")
        assert row["parameters"] == settings.training.scheduler.warmup
        batch = settings.training.global_train_batch_size * 32
        assert 20 * row["parameters"] <= row["tokens"] < 20 * row["parameters"] + batch
    assert max(abs(row["residual"]) for row in record["runs"]) < 0.05
    assert Path("out/scaling.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert main(["ladder", "fit", *runs, "-o", "out", "--metric", "eval/same/CrossEntropyLoss"]) == 0
    assert main(["ladder", "fit", *runs, "-o", "out", "--metric", "eval/other/CrossEntropyLoss"]) == 2
    assert "eval/same/CrossEntropyLoss" in capsys.readouterr().err
