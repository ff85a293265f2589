import threading
import time
from pathlib import Path

from olmo_hf.callbacks.args import HeartbeatArgs
from olmo_hf.callbacks.heartbeat import Heartbeat


def wait_in_a_collective(seconds: float) -> None:
    time.sleep(seconds)


def test_a_standstill_is_told_once_with_step_and_stack(
    tmp_path: Path, clock, arguments, state, control, caplog
) -> None:
    callback = Heartbeat(HeartbeatArgs(timeout_seconds=60), run_dir=tmp_path, rank=3, clock=clock)
    state.global_step = 41
    callback.on_step_begin(arguments, state, control)
    clock.wait(59)
    assert not callback.check()
    clock.wait(2)
    assert callback.check()
    assert callback.check()
    text = (tmp_path / "heartbeat" / "rank3.txt").read_text()
    assert text.count("Rank 3 has made no progress for 61 s. The last complete step is 41") == 1
    assert "data of the step was read" in text
    assert "test_a_standstill_is_told_once" in text, "the stack of the main thread"
    assert "no progress" in caplog.text
    callback.on_step_end(arguments, state, control)
    assert not callback.check(), "a run that was only slow goes on"
    clock.wait(61)
    assert callback.check()
    assert (tmp_path / "heartbeat" / "rank3.txt").read_text().count("no progress") == 2


def test_the_thread_finds_it_by_itself_and_ends_with_training(tmp_path: Path, arguments, state, control) -> None:
    callback = Heartbeat(HeartbeatArgs(timeout_seconds=0.2), run_dir=tmp_path, rank=0)
    callback.on_train_begin(arguments, state, control)
    try:
        wait_in_a_collective(0.6)
        assert "wait_in_a_collective" in (tmp_path / "heartbeat" / "rank0.txt").read_text()
    finally:
        callback.on_train_end(arguments, state, control)
    deadline = time.monotonic() + 5
    while any(thread.name == "heartbeat" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
