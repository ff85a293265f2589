"""Optimizers without a schedule (`optim: schedule_free_*`): two sets of weights, and counters in the groups.

While such an optimizer trains, the model holds the point at which gradients are taken; what is evaluated and kept is
an average (Defazio et al. 2024, arXiv:2405.15682). The optimizer swaps the two, and everybody else must ask it to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from olmo_hf.training.tensors import Table

_PREFIX = "schedule_free."
_COUNTERS = ("k", "weight_sum", "lr_max")
"""What these optimizers keep per group and not per parameter: updates done, and the weights of the average."""


def swaps_weights(optimizer: Any) -> bool:
    """Whether the model's weights are other ones in training than in evaluation."""
    return any("train_mode" in group for group in getattr(optimizer, "param_groups", ()))


@contextmanager
def averaged_weights(optimizer: Any, *, exactly: bool = False) -> Iterator[None]:
    """Inside, the model holds the weights that are evaluated and kept; afterwards those that were there before.

    Args:
        optimizer: of any kind.
        exactly: to the last bit, for which a copy of the weights is held meanwhile. Else the optimizer computes them
            from the averaged ones, as it does where a run goes on from a checkpoint: what saves must do the same.
    """
    if not (swaps_weights(optimizer) and any(group["train_mode"] for group in optimizer.param_groups)):
        yield
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]] if exactly else []
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for parameter, values in zip(parameters, before, strict=True):
                parameter.copy_(values)


def counters(optimizer: Any) -> Table:
    """The groups' counters as tensors, by name; nothing for any other optimizer."""
    if not swaps_weights(optimizer):
        return {}
    return {
        f"{_PREFIX}{number}.{key}": torch.tensor(float(group[key]), dtype=torch.float64)
        for number, group in enumerate(optimizer.param_groups)
        for key in _COUNTERS
    }


def load_counters(optimizer: Any, table: Table) -> None:
    """Puts saved counters back into the groups; the weights just read are the averaged ones."""
    if not swaps_weights(optimizer):
        return
    for number, group in enumerate(optimizer.param_groups):
        for key in _COUNTERS:
            saved = table.get(f"{_PREFIX}{number}.{key}", table.get(f"{_PREFIX}0.{key}"))
            if saved is not None:
                group[key] = int(saved.item()) if key == "k" else saved.item()
        group["train_mode"] = False


def without_counters(table: Table) -> Table:
    """The rest of what was kept beside the optimizer."""
    return {name: tensor for name, tensor in table.items() if not name.startswith(_PREFIX)}
