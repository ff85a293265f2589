"""Where the time of a few steps goes, operator by operator and function by function."""

import cProfile
import io
import pstats
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import ProfilerArgs
from olmo_hf.training.callback import OlmoCallback


class Profiler(OlmoCallback):
    """Traces `num_steps` steps of this launch after `skip_steps` others, once, on rank 0.

    Leaves `profiler/step{N}.trace.json.gz` (open it in Perfetto or chrome://tracing) and `profiler/step{N}.txt`, the
    most expensive operators; with `python` also `profiler/step{N}.python.txt`, the functions of Python that took the
    most time. Steps are counted from the start of the launch, so a resumed run is profiled too.
    """

    def __init__(self, args: ProfilerArgs, *, run_dir: Path):
        self._args = args
        self._directory = run_dir / "profiler"
        self._profile: profile | None = None
        self._python = cProfile.Profile() if args.python else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # One step of warm-up: the profiler's own start is expensive and would be counted.
        wait = max(self._args.skip_steps - 1, 0)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=self._args.skip_steps - wait, active=self._args.num_steps, repeat=1),
            profile_memory=self._args.memory,
            with_stack=self._args.stacks,
        )
        self._profile.start()
        self._start_python()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._profile is None:
            return
        self._profile.step()
        self._start_python()
        if self._profile.step_num == self._args.skip_steps + self._args.num_steps:
            self._finish(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._profile is not None:
            self._finish(state.global_step)

    def _start_python(self) -> None:
        assert self._profile is not None
        if self._python is not None and self._profile.step_num == self._args.skip_steps:
            self._python.enable()

    def _finish(self, step: int) -> None:
        assert self._profile is not None
        finished, self._profile = self._profile, None
        traced = finished.step_num > self._args.skip_steps
        finished.stop()
        if self._python is not None:
            self._python.disable()
        if not traced:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        finished.export_chrome_trace(str(self._directory / f"step{step}.trace.json.gz"))
        averages = finished.key_averages()
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        (self._directory / f"step{step}.txt").write_text(averages.table(sort_by=by, row_limit=40), encoding="utf-8")
        if self._python is not None:
            table = io.StringIO()
            pstats.Stats(self._python, stream=table).sort_stats("cumulative").print_stats(60)
            (self._directory / f"step{step}.python.txt").write_text(table.getvalue(), encoding="utf-8")
