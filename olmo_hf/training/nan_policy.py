"""What to do when a loss or gradient is not a number: decided before the update, the same way on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from olmo_hf.training.clipping import GradientNorms

NanPolicy = Literal["stop", "skip"]
Verdict = Literal["update", "skip", "stop"]


@dataclass
class SkippedSteps:
    """How many updates were left out in this launch."""

    total: int = 0
    """All of them."""

    in_a_row: int = 0
    """Those since the last update."""


def is_finite(norms: GradientNorms, loss: torch.Tensor) -> torch.Tensor:
    """Whether the update may happen: scalar boolean tensor, on the device.

    The norm of all gradients is the same on all ranks, and a loss that is no number makes the reduced gradient none
    either; the loss of this rank is looked at as well, for models whose loss can overflow while its gradient does not.
    """
    return norms.total.isfinite() & loss.isfinite()


def judge_step(finite: bool, *, policy: NanPolicy, skipped: SkippedSteps, max_skipped_in_a_row: int) -> Verdict:
    """Decides on one update and counts it. Pure but for the count.

    Args:
        finite: `is_finite`, agreed on by all ranks.
        policy: `stop` ends the run at the first such step; `skip` leaves the update out.
        skipped: counted up here.
        max_skipped_in_a_row: with `skip`, the run ends when one more than this would be skipped without an update.
    """
    if finite:
        skipped.in_a_row = 0
        return "update"
    if policy == "stop" or skipped.in_a_row >= max_skipped_in_a_row:
        return "stop"
    skipped.total += 1
    skipped.in_a_row += 1
    return "skip"


def not_a_number_message(
    *, step: int, rank: int, instance_ids: Sequence[int], skipped: SkippedSteps, grad_norm: float, loss: float
) -> str:
    """The last words of a run that ends for it: what, where, which data, and what can be done."""
    before = f" after {skipped.in_a_row} updates skipped in a row" if skipped.in_a_row > 0 else ""
    return (
        f"step {step}, rank {rank}: the update is not a number (loss of this rank {loss}, gradient norm {grad_norm})"
        f"{before}. No weight was changed and no checkpoint overwritten. This rank read the instances "
        f"{list(instance_ids)}: look at them with `olmo-hf inspect-data`; or lower training.learning_rate, lower "
        "training.max_grad_norm, or set training.nan_policy to skip"
    )
