"""When ranks ask each other during an evaluation whether to cut it short, and what is left of one that was."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from olmo_hf.training.evaluating import SECONDS_BETWEEN_LOOKS, EvaluationCutShort, StopLooks, run_evaluators


def looks_taken(seconds_per_pass: float, passes: int) -> list[int]:
    """Passes before which somebody looks."""
    return [round(moment / seconds_per_pass) for moment in moments_of_looks([seconds_per_pass] * passes)]


def moments_of_looks(seconds_of_passes: list[float]) -> list[float]:
    """When somebody looks, in seconds since the first pass."""
    now, taken = 0.0, []

    def is_wanted() -> bool:
        taken.append(now)
        return False

    looks = StopLooks(is_wanted, clock=lambda: now)
    for seconds in seconds_of_passes:
        looks.before_pass()
        now += seconds
    return taken


def test_looks_are_seconds_apart_however_long_a_pass_takes() -> None:
    assert looks_taken(10.0, 5) == [0, 2, 3, 4], "at the first look nobody knows yet how long a pass takes"
    quick = looks_taken(0.001, 20_000)
    assert quick[:6] == [0, 2, 6, 14, 30, 62], "twice as far each time, since the first passes say little"
    between = [b - a for a, b in zip(quick[-4:], quick[-3:], strict=False)]
    assert between == [round(SECONDS_BETWEEN_LOOKS / 0.001)] * 3


def test_passes_that_become_slow_bring_the_looks_nearer() -> None:
    taken = moments_of_looks([0.001] * 10_000 + [1.0] * 3_000)
    assert taken[-1] - taken[-2] == pytest.approx(SECONDS_BETWEEN_LOOKS)


class Judge:
    """Says one number after one pass."""

    def __init__(self, label: str):
        self.label = label

    def evaluate(
        self, model: nn.Module, *, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> dict[str, float]:
        with autocast():
            return {self.label: 1.0}


def test_what_had_ended_is_kept_and_training_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    model, passes = nn.Dropout(), []

    def autocast() -> AbstractContextManager[Any]:
        passes.append(model.training)
        if len(passes) == 3:
            raise EvaluationCutShort
        return nullcontext()

    judges = [Judge(label) for label in "abcd"]
    assert run_evaluators(judges, model, device=torch.device("cpu"), autocast=autocast) == {"a": 1.0, "b": 1.0}
    assert passes == [False] * 3
    assert model.training
    assert torch.is_grad_enabled()
    assert "cut short after 2 of 4 evaluators" in caplog.text
