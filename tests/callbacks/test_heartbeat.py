import sys
import threading
import time
from pathlib import Path

from olmo_hf.callbacks.args import HeartbeatArgs
from olmo_hf.callbacks.heartbeat import Heartbeat, collective_of


def wait_in_a_collective(seconds: float) -> None:
    time.sleep(seconds)


def test_a_standstill_is_told_once_with_step_and_stack(
    tmp_path: Path, clock, arguments, state, control, caplog
) -> None:
    callback = Heartbeat(HeartbeatArgs(timeout_seconds=60), run_dir=tmp_path, rank=3, clock=clock)
    state.global_step = 41
    callback.on_step_end(arguments, state, control)
    callback.on_step_begin(arguments, state, control)
    clock.wait(59)
    assert not callback.check()
    clock.wait(2)
    assert callback.check()
    assert callback.check()
    text = (tmp_path / "heartbeat" / "rank3.txt").read_text()
    assert text.count("Rank 3 has made no progress for 61 s. The last complete step is 41") == 1
    assert "data of the step was read" in text
    assert "It is in no collective: others may wait for it" in text
    assert "test_a_standstill_is_told_once" in text, "the stack of the main thread"
    assert "no progress" in caplog.text
    callback.on_step_end(arguments, state, control)
    assert not callback.check(), "a run that was only slow goes on"
    clock.wait(61)
    assert callback.check()
    assert (tmp_path / "heartbeat" / "rank3.txt").read_text().count("no progress") == 2


def test_the_thread_finds_it_by_itself_and_ends_with_training(tmp_path: Path, arguments, state, control) -> None:
    callback = Heartbeat(HeartbeatArgs(timeout_seconds=0.2, slow_timeout_seconds=0.2), run_dir=tmp_path, rank=0)
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


def test_evaluations_saves_and_the_first_step_have_more_time(tmp_path: Path, clock, arguments, state, control) -> None:
    args = HeartbeatArgs(timeout_seconds=60, slow_timeout_seconds=600)
    callback = Heartbeat(args, run_dir=tmp_path, rank=0, clock=clock)
    callback.on_step_begin(arguments, state, control)
    clock.wait(500)
    assert not callback.check(), "the first step compiles"
    callback.on_step_end(arguments, state, control)
    clock.wait(61)
    assert callback.check()
    for what in ("evaluation", "checkpoint"):
        for _ in range(3):
            callback.on_long_work(state, what)
            clock.wait(500)
            assert not callback.check(), "each forward pass of an evaluation is progress"
        clock.wait(101)
        assert callback.check(), "it hangs all the same"
    assert "the last thing done: checkpoint under way" in (tmp_path / "heartbeat" / "rank0.txt").read_text()
    callback.on_save(arguments, state, control)
    clock.wait(61)
    assert callback.check()


def test_the_collective_is_named_with_its_caller() -> None:
    frames: list[str | None] = []
    source = "def all_reduce(look):\n    look()\n"
    space: dict = {}
    exec(compile(source, "/x/torch/distributed/distributed_c10d.py", "exec"), space)

    def wrapper() -> None:
        space["all_reduce"](lambda: frames.append(collective_of(sys._getframe())))

    wrapper()
    assert frames[0] is not None
    assert frames[0].startswith("the collective all_reduce, called at ")
    assert "test_heartbeat.py" in frames[0]
    assert collective_of(sys._getframe()) is None
    assert collective_of(None) is None
