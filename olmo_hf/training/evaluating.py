"""The seam between the trainer and whatever judges the model: who may evaluate, and how training is left untouched."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import nn


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

    Every rank calls this with the same evaluators in the same order and gets the same dictionary.
    """
    metrics: dict[str, float] = {}
    with training_left_untouched(model):
        for evaluator in evaluators:
            metrics.update(evaluator.evaluate(model, device=device, autocast=autocast))
    return metrics
