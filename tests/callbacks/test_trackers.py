import os
from pathlib import Path

import pytest
import torch
from transformers.integrations import TensorBoardCallback, integration_utils

from olmo_hf.callbacks.trackers import TRACKER_ID_FILE, prepare_trackers, shield_trackers

LOGS = {"train/CrossEntropyLoss": 2.5, "optim/total_grad_norm": 0.5, "loss": 2.5, "eval_loss": 3.0}


def test_a_restart_goes_on_under_the_same_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_trackers(tmp_path / "run")
    first = os.environ["WANDB_RUN_ID"]
    assert len(first) == 8
    assert (tmp_path / "run" / TRACKER_ID_FILE).read_text().strip() == first
    assert os.environ["WANDB_RESUME"] == "allow"
    monkeypatch.delenv("WANDB_RUN_ID")
    prepare_trackers(tmp_path / "run")
    assert os.environ["WANDB_RUN_ID"] == first
    monkeypatch.delenv("WANDB_RUN_ID")
    prepare_trackers(tmp_path / "another")
    assert os.environ["WANDB_RUN_ID"] != first


def test_what_the_user_set_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    prepare_trackers(tmp_path)
    assert os.environ["WANDB_RUN_ID"] == "mine"
    assert "WANDB_RESUME" not in os.environ
    assert not (tmp_path / TRACKER_ID_FILE).exists()


def test_our_names_are_kept_and_others_are_put_where_they_were(tmp_path: Path) -> None:
    for _ in range(2):  # twice is not twice as much
        prepare_trackers(tmp_path)
    assert integration_utils.rewrite_logs(LOGS) == {
        "train/CrossEntropyLoss": 2.5,
        "optim/total_grad_norm": 0.5,
        "train/loss": 2.5,
        "eval/loss": 3.0,
    }


def test_tensorboard_gets_them_in_the_run_directory(tmp_path: Path, arguments, state, control) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    prepare_trackers(tmp_path)
    callback = TensorBoardCallback()
    shield_trackers([callback])
    callback.on_train_begin(arguments, state, control, model=torch.nn.Linear(1, 1))
    state.global_step = 7
    callback.on_log(arguments, state, control, logs=LOGS)
    callback.on_train_end(arguments, state, control)
    reader = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (point,) = reader.Scalars("optim/total_grad_norm")
    assert (point.step, point.value) == (7, 0.5)


class Failing(TensorBoardCallback):
    """A tracker of transformers whose disk is full."""

    def __init__(self, begins: bool):
        self.begins = begins
        self.calls = 0

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.begins:
            raise ConnectionError("no network")

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.calls += 1
        raise OSError(28, "No space left on device")


Failing.__module__ = TensorBoardCallback.__module__


def test_a_tracker_that_fails_ends_nothing_and_is_left_alone_after_three_times(
    arguments, state, control, caplog
) -> None:
    tracker = Failing(begins=True)
    shield_trackers([tracker])
    tracker.on_train_begin(arguments, state, control)
    for _ in range(10):
        tracker.on_log(arguments, state, control, logs=LOGS)
    assert tracker.calls == 3
    assert "No space left on device" in caplog.text
    assert caplog.text.count("Training goes on, without it") == 1


def test_a_tracker_that_cannot_begin_is_left_alone(arguments, state, control, caplog) -> None:
    tracker = Failing(begins=False)
    shield_trackers([tracker])
    tracker.on_train_begin(arguments, state, control)
    tracker.on_log(arguments, state, control, logs=LOGS)
    assert tracker.calls == 0
    assert "no network" in caplog.text


def test_our_own_callbacks_still_may_raise(arguments, state, control) -> None:
    class Ours(TensorBoardCallback):
        def __init__(self):
            pass

        def on_log(self, args, state, control, logs=None, **kwargs):
            raise ValueError("ours")

    callback = Ours()
    shield_trackers([callback])
    with pytest.raises(ValueError, match="ours"):
        callback.on_log(arguments, state, control)
