"""What to do when a loss or gradient is not a number: decided before the update, the same way on every rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from olmo_hf.distributed import all_reduce_sum
from olmo_hf.training.clipping import GradientNorms

NanPolicy = Literal["stop", "skip"]
Verdict = Literal["update", "skip", "stop"]

_MOST_RANKS, _MOST_IDS = 4, 64
"""What a message names; the rest is in the run's `data-indices/`."""


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


@dataclass(frozen=True)
class RankReport:
    """What one rank knows of a step that is no number."""

    rank: int
    """Its number."""

    loss: float
    """What it contributed to the loss of the step."""

    instance_ids: list[int]
    """What it read."""


def not_a_number_message(*, step: int, reports: Sequence[RankReport], skipped: SkippedSteps, grad_norm: float) -> str:
    """The last words of a run that ends for it: what, where, which data, and what can be done.

    Args:
        step: number of the update.
        reports: one of every rank; those whose loss is no number are named, or all where only the gradient is none.
        skipped: updates left out before.
        grad_norm: norm of all gradients.
    """
    suspects = [report for report in reports if not math.isfinite(report.loss)] or list(reports)
    named = suspects[:_MOST_RANKS]
    ranks = ", ".join(str(report.rank) for report in named) + (", ..." if len(suspects) > len(named) else "")
    before = f" after {skipped.in_a_row} updates skipped in a row" if skipped.in_a_row > 0 else ""
    read = "; ".join(f"rank {r.rank} (loss {r.loss}) read the instances {_shortened(r.instance_ids)}" for r in named)
    return (
        f"step {step}, rank {ranks}: the update is not a number (gradient norm {grad_norm}){before}. No weight was "
        f"changed and no checkpoint overwritten. {read}: look at them with `olmo-hf inspect-data`; or lower "
        "training.learning_rate, lower training.max_grad_norm, or let such steps be skipped (training.nan_policy, "
        "training.max_skipped_steps)"
    )


def _shortened(ids: Sequence[int]) -> str:
    more = f", and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return f"[{', '.join(str(i) for i in ids[:_MOST_IDS])}{more}]"
