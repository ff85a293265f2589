import gzip
import json
from pathlib import Path

import torch

from olmo_hf.callbacks.args import CallbacksArgs, ProfilerArgs, callbacks_problems
from olmo_hf.callbacks.profiler import Profiler


def train(callback: Profiler, arguments, state, control, steps: int) -> None:
    callback.on_train_begin(arguments, state, control)
    for _ in range(steps):
        with torch.profiler.record_function(f"step {state.global_step + 1}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        state.global_step += 1
        callback.on_step_end(arguments, state, control)
    callback.on_train_end(arguments, state, control)


def test_exactly_the_chosen_steps_are_traced(tmp_path: Path, arguments, state, control) -> None:
    state.global_step = 100  # a resumed run
    train(Profiler(ProfilerArgs(skip_steps=2, num_steps=2), run_dir=tmp_path), arguments, state, control, 6)
    trace = json.loads(gzip.open(tmp_path / "profiler" / "step104.trace.json.gz").read())  # noqa: SIM115
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert {name for name in names if name.startswith("step 1")} == {"step 103", "step 104"}
    assert "aten::mm" in (tmp_path / "profiler" / "step104.txt").read_text()


def test_a_run_too_short_leaves_nothing_behind(tmp_path: Path, arguments, state, control) -> None:
    train(Profiler(ProfilerArgs(skip_steps=5, num_steps=2), run_dir=tmp_path), arguments, state, control, 3)
    assert not (tmp_path / "profiler").exists()


def test_only_rank_0_traces(tmp_path: Path, arguments, state, control) -> None:
    state.is_world_process_zero = False
    train(Profiler(ProfilerArgs(skip_steps=0, num_steps=1), run_dir=tmp_path), arguments, state, control, 2)
    assert not (tmp_path / "profiler").exists()


def spend_time() -> None:
    sum(range(1000))


def test_the_functions_of_python_in_the_same_steps(tmp_path: Path, arguments, state, control) -> None:
    callback = Profiler(ProfilerArgs(skip_steps=1, num_steps=2, python=True), run_dir=tmp_path)
    callback.on_train_begin(arguments, state, control)
    for _ in range(5):
        spend_time()
        state.global_step += 1
        callback.on_step_end(arguments, state, control)
    callback.on_train_end(arguments, state, control)
    (line,) = [
        line for line in (tmp_path / "profiler" / "step3.python.txt").read_text().splitlines() if "spend_time" in line
    ]
    assert line.split()[0] == "2", "calls in two of the five steps"


def test_two_profilers_of_python_are_refused() -> None:
    (problem,) = callbacks_problems(CallbacksArgs(profiler=ProfilerArgs(python=True, stacks=True)))
    assert problem.startswith("callbacks.profiler.python is true together with stacks")
