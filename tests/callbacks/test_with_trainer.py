"""The callbacks in real runs: what is on record, and that watching changes nothing."""

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.callbacks.json_lines import EVENTS_FILE, METRICS_FILE, read_json_lines
from tests import runs
from tests.forks import Forks


def write_evaluated_run(directory: Path, *, callbacks: dict | None = None, **training) -> Path:
    """As `runs.write_run`, with an evaluator that runs at the start and every second step."""
    path = runs.write_run(directory, save_interval_ephemeral=None, **training)
    np.random.default_rng(7).integers(2, 128, 16 * 5, dtype=np.uint16).tofile(directory / "held-out.npy")
    settings = yaml.safe_load(path.read_text())
    data = {"paths": [str(directory / "held-out.npy")], "token_dtype": "uint16", "sequence_length": 16}
    settings["evaluation"] = {"interval": 2, "on_load": True, "evaluators": [{"label": "held-out", "data": data}]}
    settings["callbacks"].update(callbacks or {})
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def watched(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything on, logged every fifth step."""
    directory = tmp_path_factory.mktemp("watched")
    callbacks = {"console": {"style": "lines"}, "profiler": {"skip_steps": 1, "num_steps": 1}}
    forks.run(write_evaluated_run(directory, callbacks=callbacks, logging_steps=5))
    return directory / "run"


def test_watching_and_evaluating_change_no_bit(watched: Path, undisturbed: Path) -> None:
    assert runs.weights(watched) == runs.weights(undisturbed)


def test_every_log_and_evaluation_has_step_and_tokens_and_the_last_steps_are_logged(watched: Path) -> None:
    rows = list(read_json_lines(watched / METRICS_FILE))
    assert all(row["tokens"] == row["step"] * 128 for row in rows), "one clock for training and evaluation"
    train = [row for row in rows if "train/CrossEntropyLoss" in row]
    assert [row["step"] for row in train] == [5, 10, 12], "steps 11 and 12 are not lost"
    evaluations = [row for row in rows if "eval/held-out/Perplexity" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6, 8, 10, 12]
    for row in evaluations:
        loss = row["eval/held-out/CrossEntropyLoss"]
        assert row["eval/held-out/Perplexity"] == pytest.approx(math.exp(loss), rel=1e-12)
    assert evaluations[-1]["eval/held-out/CrossEntropyLoss"] != evaluations[0]["eval/held-out/CrossEntropyLoss"]
    assert not [key for row in rows for key in row if key.startswith("_")], "trackers keep such names for themselves"
    for name in ("tokens_per_second", "batches_per_second", "mfu"):
        assert train[-1][f"throughput/device/{name}"] > 0
    assert train[-1]["throughput/seconds_left"] == 0


def test_what_else_is_on_record(watched: Path) -> None:
    events = [event["event"] for event in read_json_lines(watched / EVENTS_FILE)]
    assert events[0] == "start"
    assert events[-1] == "end"
    assert events.count("checkpoint") == 2
    instances = read_data_indices(data_indices_path(watched, 0))
    assert list(instances) == list(range(1, runs.STEPS + 1))
    assert all(len(set(ids)) == 8 for ids in instances.values())
    epoch = [one for step in range(1, 6) for one in instances[step]]
    assert len(set(epoch)) == 40, "an epoch repeats nothing"
    assert list((watched / "profiler").glob("step2.*"))


def test_the_console_shows_progress_evaluations_and_the_result(watched: Path) -> None:
    text = (watched.parent / "log.txt").read_text()
    assert "step 12/12  loss " in text
    assert "evaluation at step 12  held-out/CrossEntropyLoss" in text
    assert text.index("step 12/12") < text.index("Result")
    assert "\x1b" not in text


def test_while_weights_stay_every_evaluation_says_the_same(forks: Forks, tmp_path: Path) -> None:
    # Steps of 1e-30 change no bit of a float32 weight.
    forks.run(write_evaluated_run(tmp_path, max_duration=6, learning_rate=1e-30, weight_decay=0.0))
    rows = read_json_lines(tmp_path / "run" / METRICS_FILE)
    values = [row["eval/held-out/CrossEntropyLoss"] for row in rows if "eval/held-out/CrossEntropyLoss" in row]
    assert len(values) == 4
    assert len(set(values)) == 1
