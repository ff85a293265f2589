"""What to do when a loss or gradient is not a number: decided before the update, the same way on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from olmo_hf.distributed import all_reduce_sum
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


def is_finite(norms: GradientNorms, loss: torch.Tensor) -> bool:
    """Whether the update may happen: no rank has a gradient or a loss that is NaN or infinite.

    A collective, and the one wait for the device in a step: an update that is no number must not happen.

    Args:
        norms: of all gradients, after their reduction over ranks.
        loss: what this rank contributed to the loss of the step, scalar.
    """
    broken = ~(norms.total.isfinite() & loss.isfinite())
    return not bool(all_reduce_sum(broken.float()) > 0)


def judge_step(finite: bool, *, policy: NanPolicy, skipped: SkippedSteps, max_skipped_in_a_row: int) -> Verdict:
    """Decides on one update and counts it; the same on every rank.

    Args:
        finite: what `is_finite` said.
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
        "training.max_grad_norm, or let such steps be skipped (training.nan_policy, training.max_skipped_steps)"
    )
