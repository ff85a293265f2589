"""When a run stops and saves, and what: decided alike on all ranks."""

import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from transformers import TrainerControl, TrainerState

from olmo_hf.distributed import all_reduce_sum, is_main_process
from olmo_hf.training.arguments import OlmoTrainingArguments
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.training.commit import Kind
from olmo_hf.training.durations import Interval, SaveIntervals

Due = Literal["permanent", "ephemeral", "unsharded"]
NAMES: tuple[Due, ...] = ("permanent", "ephemeral", "unsharded")


def last_step(args: OlmoTrainingArguments, state: TrainerState) -> int:
    """The step after which this launch ends."""
    return state.max_steps if args.stop_step is None else min(args.stop_step, state.max_steps)


def save_intervals(args: OlmoTrainingArguments) -> SaveIntervals:
    """The intervals of the YAML, or what Hugging Face's own arguments say."""
    if args.save_intervals is not None:
        return args.save_intervals
    if args.save_strategy == "steps":
        return SaveIntervals(permanent=Interval(steps=int(args.save_steps)))
    return SaveIntervals()


def saves_at_all(args: OlmoTrainingArguments) -> bool:
    """Whether the last step is kept: always with the intervals of a YAML, but not under `save_strategy="no"`."""
    return args.save_intervals is not None or args.save_strategy != "no"


def what_to_save(
    due: set[Due], *, step: int, final: bool, sharded: bool, unsharded_optimizer: bool
) -> tuple[Kind, bool]:
    """Kind of a checkpoint, and whether it holds the optimizer.

    A step that is due for several is one checkpoint that serves all. The last one of a launch is always a loadable
    model with all that is needed to go on. The checkpoint before the first step gives way to the first real one.

    Args:
        due: what is due at this step; nothing is, when somebody else asked for a checkpoint.
        step: optimizer steps taken.
        final: whether this launch ends here.
        sharded: whether each rank holds only its part of the model.
        unsharded_optimizer: whether a checkpoint that is due as `unsharded` only holds the optimizer.
    """
    if final:
        return "unsharded", True
    if step == 0:
        return "ephemeral", True
    if "unsharded" in due:
        return "unsharded", unsharded_optimizer or len(due) > 1
    if due == {"ephemeral"}:
        return "ephemeral", True
    return "sharded" if sharded else "unsharded", True


class SaveSchedule(OlmoCallback):
    """Asks for checkpoints when they are due, and ends this launch at its last step; always present.

    Minutes are counted from the last checkpoint that served the same purpose, by the clock of rank 0 that never goes
    back; only then do the ranks talk about it, once a step.

    Args:
        clock: seconds that only ever grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.due: set[Due] = set()
        self._clock = clock
        self._last_seconds: dict[Due, float] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._last_seconds = dict.fromkeys(NAMES, self._clock())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.due = self._due(save_intervals(args), state.global_step)
        if self.due:
            control.should_save = True
        if state.global_step >= last_step(args, state):
            control.should_training_stop = True
            control.should_save = saves_at_all(args)
            control.should_log = True

    def _due(self, intervals: SaveIntervals, step: int) -> set[Due]:
        wanted = {name: getattr(intervals, name) for name in NAMES}
        due: set[Due] = {n for n, i in wanted.items() if i is not None and i.steps is not None and step % i.steps == 0}
        by_minutes = {n: 60.0 * i.minutes for n, i in wanted.items() if i is not None and i.minutes is not None}
        if by_minutes:
            now = self._clock()
            reached = [now - self._last_seconds[name] >= seconds for name, seconds in by_minutes.items()]
            flags = torch.tensor([float(flag and is_main_process()) for flag in reached])
            due |= {name for name, flag in zip(by_minutes, all_reduce_sum(flags).tolist(), strict=True) if flag > 0}
            served: set[Due] = {"ephemeral"} if "permanent" in due else set()
            self._last_seconds.update(dict.fromkeys(due | served, now))
        return due
