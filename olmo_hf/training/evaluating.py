"""The seam between the trainer and whatever judges the model: who may evaluate, and how training is left untouched."""

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import nn

from olmo_hf.distributed import all_reduce_sum, is_main_process, world_size

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 2.0
"""How long an evaluation goes on, about, before the ranks ask each other whether to cut it short."""


class EvaluationCutShort(Exception):
    """Some rank has a reason to stop. Raised on all ranks before the same forward pass."""


class Evaluator(Protocol):
    """Something that turns a model into a few numbers.

    `evaluate` is called on every rank at the same step, in evaluation mode and without gradients. An implementation
    must run the same number of forward passes on every rank (under FSDP, and under DDP when the model has buffers,
    each forward pass is a collective) and must return the same numbers on every rank.
    """

    label: str
    """Name of the evaluator in the metrics, for example `eval/{label}/Perplexity`."""

    def evaluate(
        self, model: nn.Module, *, device: torch.device, autocast: Callable[[], AbstractContextManager[object]]
    ) -> dict[str, float]:
        """Metrics by their full names. `autocast()` opens the context in which the model runs in training."""
        ...


class StopLooks:
    """Lets all ranks agree, before one forward pass in so many, whether an evaluation is cut short.

    All of them make equally many passes, and how many come before the next look is reckoned from a sum over the
    ranks: so they look before the same pass, and a look costs nothing beside the passes, however quick those are.

    Args:
        is_wanted: whether this rank has a reason.
        clock: seconds, monotonic.
    """

    def __init__(self, is_wanted: Callable[[], bool], clock: Callable[[], float] = time.monotonic):
        self._is_wanted = is_wanted
        self._clock = clock
        self._looked_at = clock()
        self._passes = self._passes_left = 1

    def before_pass(self) -> None:
        """Called before every forward pass.

        Raises:
            EvaluationCutShort: on all ranks.
        """
        self._passes_left -= 1
        if self._passes_left > 0:
            return
        milliseconds = round(1000 * (self._clock() - self._looked_at))
        # Whole numbers, whose sum is the same in every order.
        reasons, total = all_reduce_sum(torch.tensor([int(self._is_wanted()), milliseconds])).tolist()
        if reasons:
            raise EvaluationCutShort
        fitting = int(1000 * SECONDS_BETWEEN_LOOKS * self._passes * world_size() / max(total, 1))
        self._passes = self._passes_left = min(max(fitting, 1), 2 * self._passes)
        self._looked_at = self._clock()


@contextmanager
def training_left_untouched(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside; training mode and all random states as before afterwards.

    What is compiled for training is neither used nor added to: batches of evaluation have other shapes.
    """
    was_training = model.training
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    model.eval()
    try:
        with torch.no_grad(), _nothing_compiled():
            yield
    finally:
        model.train(was_training)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states is not None:
            torch.cuda.set_rng_state_all(cuda_states)


def _nothing_compiled() -> AbstractContextManager[object]:
    # Asking for it would import the compiler, which takes seconds.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def run_evaluators(
    evaluators: Sequence[Evaluator],
    model: nn.Module,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
) -> dict[str, float]:
    """Union of what the evaluators say of `model`, in their order. Training is left untouched.

    Every rank calls this with the same evaluators in the same order and gets the same dictionary. When `autocast`
    raises `EvaluationCutShort`, which it must do on all ranks, it holds what the evaluators before have said.
    """
    metrics: dict[str, float] = {}
    left = list(evaluators)
    try:
        with training_left_untouched(model):
            while left:
                metrics.update(left[0].evaluate(model, device=device, autocast=autocast))
                del left[0]
    except EvaluationCutShort:
        if is_main_process():
            logger.warning(
                "The run is asked to stop: this evaluation was cut short after %d of %d evaluators.",
                len(evaluators) - len(left),
                len(evaluators),
            )
    return metrics
