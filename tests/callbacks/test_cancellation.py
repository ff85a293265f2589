import datetime
import math
import os
import signal
import time
from pathlib import Path

import pytest

from olmo_hf.callbacks.args import CancellationArgs
from olmo_hf.callbacks.cancellation import CANCEL_FILE, Cancellation, StopReason, exit_code_of
from olmo_hf.errors import ConfigError

LAST_STEP = 100


class Recorder(list):
    def __call__(self, state, name, **details) -> None:
        self.append((state.global_step, name, details))


def cancellation(run_dir: Path, clock=time.monotonic, **options) -> Cancellation:
    keys = ("early_stopping_after_steps", "record", "wall_clock", "environment")
    others = {key: options.pop(key) for key in keys if key in options}
    return Cancellation(CancellationArgs(**options), run_dir=run_dir, last_step=LAST_STEP, clock=clock, **others)


def one_step(callback: Cancellation, arguments, state, control, loss: float | None = None) -> tuple[bool, bool]:
    """As the trainer: flags cleared, a step, what others ask for; says whether it saves and whether it stops."""
    control._new_step()
    state.global_step += 1
    if state.global_step % 10 == 0:
        control.should_save = control.should_evaluate = True
    callback.on_step_end(arguments, state, control)
    if loss is not None:
        callback.on_log(arguments, state, control, logs={"train/CrossEntropyLoss": loss})
    return control.should_save, control.should_training_stop


def test_a_file_stops_the_run_with_a_checkpoint_and_is_removed(tmp_path, arguments, state, control) -> None:
    record = Recorder()
    callback = cancellation(tmp_path, record=record)
    assert one_step(callback, arguments, state, control) == (False, False)
    (tmp_path / CANCEL_FILE).touch()
    assert one_step(callback, arguments, state, control) == (True, True)
    assert not (tmp_path / CANCEL_FILE).exists(), "or the next launch would stop at once"
    assert callback.stop_reason is StopReason.CANCEL_FILE
    assert record == [(2, "cancel", {"reason": "CANCEL file"})]
    assert exit_code_of([object(), callback]) == 3


def test_without_a_reason_the_exit_code_is_zero(tmp_path) -> None:
    assert exit_code_of([cancellation(tmp_path)]) == 0
    assert exit_code_of([]) == 0


def test_extra_steps_run_without_checkpoints_and_evaluations(tmp_path, arguments, state, control) -> None:
    callback = cancellation(tmp_path, extra_steps=3)
    state.global_step = 7
    (tmp_path / CANCEL_FILE).touch()
    assert one_step(callback, arguments, state, control) == (True, False)
    assert one_step(callback, arguments, state, control) == (False, False)
    assert one_step(callback, arguments, state, control) == (False, False), "step 10 would have been saved"
    assert not control.should_evaluate
    assert one_step(callback, arguments, state, control) == (False, True)
    assert state.global_step == 11


def test_looks_only_every_interval_steps(tmp_path, arguments, state, control) -> None:
    callback = cancellation(tmp_path, interval_steps=4)
    (tmp_path / CANCEL_FILE).touch()
    stopped = [one_step(callback, arguments, state, control)[1] for _ in range(4)]
    assert stopped == [False, False, False, True]


def test_the_last_step_is_an_ordinary_end(tmp_path, arguments, state, control) -> None:
    callback = cancellation(tmp_path)
    (tmp_path / CANCEL_FILE).touch()
    state.global_step = LAST_STEP - 1
    control.should_save = False
    assert one_step(callback, arguments, state, control) == (True, False), "what the trainer asked for stays"
    assert callback.stop_reason is None


def test_time_limit(tmp_path, clock, arguments, state, control) -> None:
    callback = cancellation(tmp_path, clock=clock, time_limit_seconds=10)
    callback.on_train_begin(arguments, state, control)
    try:
        for _ in range(4):
            clock.wait(2.4)
            assert one_step(callback, arguments, state, control) == (False, False)
        clock.wait(2.4)
        assert one_step(callback, arguments, state, control) == (True, True)
        assert callback.stop_reason is StopReason.TIME_LIMIT
    finally:
        callback.on_train_end(arguments, state, control)


def test_deadline_and_the_end_of_a_slurm_job(tmp_path, clock, arguments, state, control) -> None:
    moment = datetime.datetime.fromtimestamp(1050.0, tz=datetime.UTC).isoformat()
    by_deadline = cancellation(tmp_path, deadline=moment, wall_clock=clock)
    by_job = cancellation(
        tmp_path, seconds_before_job_end=30, wall_clock=clock, environment={"SLURM_JOB_END_TIME": "1080"}
    )
    assert not one_step(by_deadline, arguments, state, control)[1]
    assert not one_step(by_job, arguments, state, control)[1]
    clock.wait(50)
    assert one_step(by_deadline, arguments, state, control) == (True, True)
    assert one_step(by_job, arguments, state, control) == (True, True)
    assert (by_deadline.stop_reason, by_job.stop_reason) == (StopReason.DEADLINE, StopReason.JOB_END)


def test_a_job_end_that_is_not_known_is_said(tmp_path, caplog) -> None:
    cancellation(tmp_path, seconds_before_job_end=30, environment={})
    assert "SLURM_JOB_END_TIME is not in the environment" in caplog.text


def test_a_deadline_that_is_no_moment_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="'tomorrow', which is no moment; write it as"):
        cancellation(tmp_path, deadline="tomorrow")


def test_evaluations_are_cut_short_for_any_reason_but_the_loss(tmp_path, arguments, state, control) -> None:
    callback = cancellation(tmp_path, early_stopping_factor=1.5, interval_steps=4)
    assert not callback.wants_to_stop(state)
    for loss in (2.0, 9.0):
        one_step(callback, arguments, state, control, loss)
    assert not callback.wants_to_stop(state), "the loss asks for it, but evaluations do not make it worse"
    (tmp_path / CANCEL_FILE).touch()
    assert callback.wants_to_stop(state)
    assert (tmp_path / CANCEL_FILE).exists(), "the stop itself is still to come"
    assert callback.stop_reason is None


def test_early_stopping_after_the_warm_up(tmp_path, arguments, state, control) -> None:
    callback = cancellation(tmp_path, early_stopping_factor=1.5, early_stopping_after_steps=5, extra_steps=9)
    for loss in (4.0, 2.0, 3.5, 3.5, 2.0, 2.9):
        assert not one_step(callback, arguments, state, control, loss)[1]
    assert not one_step(callback, arguments, state, control, 3.1)[1], "2.9 is under 1.5 times 2"
    assert one_step(callback, arguments, state, control) == (True, True), "3.1 is above; no extra steps"
    assert callback.stop_reason is StopReason.EARLY_STOPPING
    assert exit_code_of([callback]) == 4


def test_the_least_loss_survives_a_restart_and_nan_stops_nothing(tmp_path, arguments, state, control) -> None:
    first = cancellation(tmp_path, early_stopping_factor=1.5)
    assert first.state_dict() == {"least_loss": None}
    one_step(first, arguments, state, control, 2.0)
    second = cancellation(tmp_path, early_stopping_factor=1.5)
    second.load_state_dict(first.state_dict())
    one_step(second, arguments, state, control, math.nan)
    assert not one_step(second, arguments, state, control, 3.1)[1]
    assert one_step(second, arguments, state, control)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_obeyed_at_the_end_of_the_step_and_handlers_return(
    tmp_path, arguments, state, control, number
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    callback = cancellation(tmp_path)
    callback.on_train_begin(arguments, state, control)
    try:
        assert not one_step(callback, arguments, state, control)[1]
        os.kill(os.getpid(), number)
        assert one_step(callback, arguments, state, control) == (True, True)
    finally:
        callback.on_train_end(arguments, state, control)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert exit_code_of([callback]) == 128 + number
