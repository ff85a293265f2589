"""Counts instead of seconds: what one training step asks torch and Python to do, the same on a busy machine.

Counted is from the end of one step to the end of the next: loading, forward, backward, clipping, update, metrics,
callbacks and log.
"""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARM_STEPS = 3
"""Steps before anything is counted: the optimizer makes its state, caches fill."""
CALL_STEPS = 5
"""Steps whose Python calls are counted; the median counts, for a few things happen by the clock."""
STEPS = WARM_STEPS + 1 + CALL_STEPS + 1
"""Steps that a run must have at least."""

SIZES = [(layers, parts) for layers in (1, 2) for parts in (1, 2)]
"""Layers and micro-batches."""

PARTS = ("layer and micro-batch", "layer", "micro-batch", "step")
"""What a count is made of: once per layer and micro-batch, once per layer, once per micro-batch, once."""


@dataclass(frozen=True)
class StepCounts:
    """What one training step asked for."""

    operations: int
    """Calls of torch's operators that compute or move something; views are free and left out."""
    bytes_touched: int
    """Bytes of the tensors that these operators read and wrote."""
    synchronisations: int
    """Numbers that the host asked a tensor for: on a GPU each waits for all work so far."""
    python_calls: int
    """Calls of functions, Python's and C's, in the main thread."""


class OperationCounter(TorchDispatchMode):
    """Counts operators while it is on, in forward and backward passes of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, int] = {}
        self.bytes_touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs if kwargs is not None else {}
        result = func(*args, **kwargs)
        if not func.is_view:
            name = func.name().partition(".")[0]
            self.by_name[name] = self.by_name.get(name, 0) + 1
            for leaf in tree_leaves((args, kwargs, result)):
                if isinstance(leaf, torch.Tensor):
                    self.bytes_touched += leaf.numel() * leaf.element_size()
        return result

    @property
    def operations(self) -> int:
        return sum(self.by_name.values())

    @property
    def synchronisations(self) -> int:
        return self.by_name.get("aten::_local_scalar_dense", 0)


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """A list whose only entry counts the calls of functions in this thread, while it is open."""
    found = [0]

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            found[0] += 1

    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)


class StepObserver:
    """Told of the end of every step, it counts operators of one and Python calls of others; never both at once."""

    def __init__(self) -> None:
        self.operations = OperationCounter()
        self.calls: list[int] = []
        self._running = [0]
        self._before = 0
        self._profile: Any = None

    def step_ended(self, step: int) -> None:
        """Args: step: how many are completed."""
        first_call_step = WARM_STEPS + 2
        if step == WARM_STEPS:
            self.operations.__enter__()
        elif step == WARM_STEPS + 1:
            self.operations.__exit__(None, None, None)
        elif step == first_call_step:
            self._profile = counted_calls()
            self._running = self._profile.__enter__()
            self._before = self._running[0]
        if first_call_step < step <= first_call_step + CALL_STEPS:
            self.calls.append(self._running[0] - self._before)
            self._before = self._running[0]
        if step == first_call_step + CALL_STEPS:
            self._profile.__exit__(None, None, None)

    def counts(self) -> StepCounts:
        assert self.calls, f"the run was too short: {STEPS} steps are needed"
        return StepCounts(
            operations=self.operations.operations,
            bytes_touched=self.operations.bytes_touched,
            synchronisations=self.operations.synchronisations,
            python_calls=int(statistics.median(self.calls)),
        )


def observe_training(words: Sequence[str], step_ended: Callable[[int], None]) -> None:
    """Run `train_hf.py` with these words in this process; the observer is told how many steps are completed."""
    import train_hf
    from olmo_hf.training.flow import SaveSchedule

    original = SaveSchedule.on_step_end

    def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        result = original(self, args, state, control, **kwargs)
        step_ended(state.global_step)
        return result

    SaveSchedule.on_step_end = on_step_end  # type: ignore[method-assign]
    try:
        if (code := train_hf.run_and_report(train_hf.main, words)) != 0:
            raise SystemExit(code)
    finally:
        SaveSchedule.on_step_end = original  # type: ignore[method-assign]


def count_training(words: Sequence[str]) -> StepObserver:
    """Run `train_hf.py` with these words in this process, and count."""
    observer = StepObserver()
    observe_training(words, observer.step_ended)
    return observer


def count_steps(step: Callable[[int], object]) -> StepObserver:
    """Count a loop of one's own, whose body is called with the number of each step."""
    observer = StepObserver()
    for number in range(STEPS):
        step(number)
        observer.step_ended(number + 1)
    return observer


def take_apart(found: dict[tuple[int, int], StepCounts]) -> dict[str, StepCounts]:
    """From the counts of the four `SIZES` to those of `PARTS`, which add up to them again."""
    small, more_parts, more_layers, large = (astuple(found[size]) for size in SIZES)
    both = [d - c - b + a for a, b, c, d in zip(small, more_parts, more_layers, large, strict=True)]
    layer = [c - a - x for a, c, x in zip(small, more_layers, both, strict=True)]
    part = [b - a - x for a, b, x in zip(small, more_parts, both, strict=True)]
    step = [a - x - y - z for a, x, y, z in zip(small, both, layer, part, strict=True)]
    return {name: StepCounts(*values) for name, values in zip(PARTS, (both, layer, part, step), strict=True)}
