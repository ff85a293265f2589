"""From a real run with a spike on record to the text that caused it."""

import datetime
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.report.history import History, load_history
from olmo_hf.report.spikes import describe_spikes, settings_at
from olmo_hf.report.write import write_report
from tests import runs
from tests.forks import Forks
from tests.invariants.test_split import FSDP
from tests.poisoned import write_poisoned_run

SPIKE_STEP = 9


@pytest.fixture(scope="module")
def run_dir(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spiky")
    forks.run(runs.write_run(directory, save_interval_ephemeral=None))
    event = {"step": SPIKE_STEP, "tokens": 1152, "time": 1.0, "event": "loss_spike", "loss": 9.0, "usual": 3.0}
    with open(directory / "run" / "events.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")
    return directory / "run"


def test_instances_sources_and_losses_of_a_spike(run_dir: Path) -> None:
    history = load_history(run_dir)
    (spike,) = describe_spikes(history, explain=True)
    assert spike["title"] == "step 9: loss 9, usual 3"
    assert "checkpoint-6" in spike["note"]
    ids = read_data_indices(data_indices_path(run_dir, 0))[SPIKE_STEP]
    assert len(spike["instances"]) == len(ids) == 8
    tokens = torch.from_file(str(run_dir.parent / "tokens.npy"), size=16 * 42, dtype=torch.uint16).long().view(42, 16)
    model = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoint-6").eval()
    seen = []
    for one in spike["instances"]:
        instance = int(one["title"].split()[1])
        assert one["text"].split() == [str(token) for token in tokens[instance].tolist()]
        assert f"tokens.npy, token {instance * 16:,}" in one["title"]
        with torch.no_grad():
            loss = model(input_ids=tokens[instance][None], labels=tokens[instance][None], use_cache=False).loss
        said = float(one["title"].split("cross-entropy ")[1].split(",")[0])
        assert said == pytest.approx(loss.item(), abs=6e-5), "four decimals are shown"
        seen.append((said, instance))
    assert sorted(instance for _, instance in seen) == sorted(ids)
    assert [loss for loss, _ in seen] == sorted((loss for loss, _ in seen), reverse=True), "the worst first"


@pytest.mark.slow
def test_checkpoints_in_shards_explain_too(forks: Forks, tmp_path: Path) -> None:
    config, run_dir = write_poisoned_run(tmp_path, (11,)), tmp_path / "run"
    forks.run(config, ranks=2, **FSDP)
    assert not list((run_dir / "checkpoint-8").glob("model*.safetensors"))
    (spike,) = describe_spikes(load_history(run_dir), explain=True)
    assert "checkpoint-8" in spike["note"]
    assert len(spike["instances"]) == 8
    said = [float(one["title"].split("cross-entropy ")[1].split(",")[0]) for one in spike["instances"]]
    logged = runs.losses(run_dir)[11][0]
    # Three steps later the model is a little surer of what it knows.
    assert sum(said) / 8 == pytest.approx(logged, abs=2.0)
    assert min(said) > 4


def test_the_instances_of_a_spike_that_the_run_left_behind(forks: Forks, tmp_path: Path) -> None:
    config, run_dir = write_poisoned_run(tmp_path, (7,), max_rollbacks=1), tmp_path / "run"
    forks.run(config)
    (spike,) = describe_spikes(load_history(run_dir), explain=True)
    assert "checkpoint-4" in spike["note"]
    tokens = [int(token) for one in spike["instances"] for token in one["text"].split()]
    assert len(tokens) == 8 * 16
    assert min(tokens) >= 50, "the poison, though step 7 was trained again on other data"
    assert spike["settings"] == (run_dir / "config.yaml").read_text()


def test_without_explain_nothing_is_computed(run_dir: Path) -> None:
    (spike,) = describe_spikes(load_history(run_dir))
    assert all("cross-entropy" not in one["title"] for one in spike["instances"])


def test_data_that_are_gone_are_said_and_the_ids_stay(run_dir: Path) -> None:
    tokens = run_dir.parent / "tokens.npy"
    aside = tokens.rename(run_dir.parent / "aside.npy")
    try:
        (spike,) = describe_spikes(load_history(run_dir))
    finally:
        aside.rename(tokens)
    assert "cannot be read here" in spike["note"]
    assert len(spike["instances"]) == 8
    assert spike["instances"][0]["title"].startswith("instance ")


def test_the_settings_in_force_are_those_of_the_last_launch_before(tmp_path: Path) -> None:
    launches = [
        {"time": "2026-11-30T00:00:10+00:00", "config": "first"},
        {"time": "torn", "config": "nothing"},
        {"time": "2026-11-30T00:00:20+00:00", "config": "second"},
        {"time": "2026-11-30T00:00:30+00:00"},
    ]
    history = History("x", tmp_path, {}, launches=launches)
    midnight = datetime.datetime(2026, 11, 30, tzinfo=datetime.UTC).timestamp()
    seconds = (9.9, 10.5, 19.9, 20, 29, 31)
    assert [settings_at(history, midnight + one) for one in seconds] == ["", "first", "first", "second", "second", ""]
    assert settings_at(history, None) == ""


def test_a_run_without_spikes_opens_nothing(tmp_path: Path) -> None:
    assert describe_spikes(History("x", tmp_path, {})) == []


def test_the_report_holds_the_text(run_dir: Path, tmp_path: Path) -> None:
    html, *_ = write_report([run_dir], tmp_path)
    assert "step 9: loss 9, usual 3" in html.read_text()
