"""Sums of token losses of a causal language model: cross-entropy and z-loss, kept apart, not yet divided.

The sums are divided by the tokens of the whole global batch elsewhere, so that no cut of the batch changes the result.

Shapes: `B` batch, `S` sequence, `N` = B * S positions, `V` vocabulary (padding included), `D` width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""Label of a position that is not trained on, as everywhere in Hugging Face's code."""

_ROWS_AT_ONCE = 256
"""Positions whose logits are brought to float32 together: bounds the temporary memory of the plain loss."""


@dataclass(frozen=True)
class LossTerms:
    """What one forward pass contributes to the loss; all tensors stay on the device, nothing waits for it."""

    total: torch.Tensor
    """Scalar, float32: `ce_sum + z_sum`. The only part that carries a gradient."""

    ce_sum: torch.Tensor
    """Scalar, float32, detached: sum of the cross-entropy over labelled targets, in nats. Never contains z."""

    z_sum: torch.Tensor
    """Scalar, float32, detached: `z_loss_weight` times the sum of squared log-partitions over labelled targets."""

    num_labels: torch.Tensor
    """Scalar, int64: labelled targets (after the shift: the first position of a row is nobody's target)."""

    token_ce: torch.Tensor | None = None
    """(B, S - 1), float32, detached: cross-entropy of each target, 0 where it is not labelled. None from liger."""


def shifted_targets(labels: torch.Tensor) -> torch.Tensor:
    """Targets of every position, (B, S) -> (B, S): position t predicts the label at t + 1, the last one nothing.

    The logits need no slicing, which would copy them.
    """
    nothing = labels.new_full((labels.shape[0], 1), IGNORE_INDEX)
    return torch.cat([labels[:, 1:], nothing], dim=1)


def count_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labelled targets of a batch, (B, S) -> scalar int64; the denominator's contribution of this batch."""
    return (labels[:, 1:] != IGNORE_INDEX).sum()


def softmax_statistics(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-partition and cross-entropy of each row from one logsumexp, both float32 and 0 where there is no target.

    Args:
        logits: (N, V), float32.
        targets: (N,).

    Returns:
        (N,) log-partition, (N,) cross-entropy.
    """
    unlabelled = targets == IGNORE_INDEX
    log_partition = torch.logsumexp(logits, dim=-1)  # (N,)
    target_logits = logits.gather(-1, targets.masked_fill(unlabelled, 0).unsqueeze(-1)).squeeze(-1)  # (N,)
    # Filled, not multiplied: a row that is not trained on may hold anything, also infinities.
    cross_entropy = (log_partition - target_logits).masked_fill(unlabelled, 0.0)
    return log_partition.masked_fill(unlabelled, 0.0), cross_entropy


def logits_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, log_partition: torch.Tensor, *, z_loss_weight: float
) -> torch.Tensor:
    """Turns float32 logits, in place, into the gradient of `cross-entropy + z_loss_weight * log_partition ** 2`.

    Args:
        logits: (N, V), float32; overwritten.
        targets: (N,).
        log_partition: (N,), as `softmax_statistics` gives it.
        z_loss_weight: 0.0 is no z term, at no cost.

    Returns:
        The same storage, (N, V); rows without a target are exactly 0.
    """
    unlabelled = targets == IGNORE_INDEX
    gradient = logits.sub_(log_partition.unsqueeze(-1)).exp_()  # softmax
    if z_loss_weight != 0.0:
        gradient.mul_((1.0 + 2.0 * z_loss_weight * log_partition).unsqueeze(-1))
    ones = torch.ones_like(log_partition).unsqueeze(-1)
    gradient.scatter_add_(-1, targets.masked_fill(unlabelled, 0).unsqueeze(-1), -ones)
    return gradient.masked_fill_(unlabelled.unsqueeze(-1), 0.0)


def z_term(log_partition: torch.Tensor, z_loss_weight: float) -> torch.Tensor:
    """`z_loss_weight * sum(log_partition ** 2)`, scalar; 0.0 without looking at the data when switched off."""
    if z_loss_weight == 0.0:
        return log_partition.new_zeros(())
    return z_loss_weight * log_partition.square().sum()


class _LogitsLoss(torch.autograd.Function):
    """Cross-entropy and z of given logits; beside the logits only their gradient is ever held in full."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, z_loss_weight: float) -> tuple:
        parts = [
            softmax_statistics(rows.float(), row_targets)
            for rows, row_targets in zip(logits.split(_ROWS_AT_ONCE), targets.split(_ROWS_AT_ONCE), strict=True)
        ]
        log_partition = torch.cat([part[0] for part in parts])  # (N,)
        token_ce = torch.cat([part[1] for part in parts])  # (N,)
        ce_sum, z_sum = token_ce.sum(), z_term(log_partition, z_loss_weight)
        ctx.save_for_backward(logits, targets, log_partition)
        ctx.z_loss_weight = z_loss_weight
        ctx.mark_non_differentiable(ce_sum, z_sum, token_ce)
        return ce_sum + z_sum, ce_sum, z_sum, token_ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, targets, log_partition = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows, row_targets, row_partition, out in zip(
            *(tensor.split(_ROWS_AT_ONCE) for tensor in (logits, targets, log_partition, gradient)), strict=True
        ):
            copy = rows.to(torch.float32, copy=True)
            logits_gradient_(copy, row_targets, row_partition, z_loss_weight=ctx.z_loss_weight)
            out.copy_(copy.mul_(grad_total))
        return gradient, None, None


def causal_lm_loss_sums(logits: torch.Tensor, labels: torch.Tensor, *, z_loss_weight: float = 0.0) -> LossTerms:
    """The plain loss, for any model that returns logits.

    Computed in float32 whatever the logits are; one logsumexp serves cross-entropy and z (z-loss: Chowdhery et al.
    2022, arXiv:2204.02311, section 5; spec: trainer.md section 5).

    Args:
        logits: (B, S, V), as the model returns them: position t predicts position t + 1.
        labels: (B, S), not shifted; -100 is not trained on.
        z_loss_weight: weight of the squared log-partition; 0.0 is off.
    """
    targets = shifted_targets(labels)  # (B, S)
    total, ce_sum, z_sum, token_ce = _LogitsLoss.apply(logits.flatten(0, 1), targets.flatten(), z_loss_weight)
    return LossTerms(
        total=total,
        ce_sum=ce_sum,
        z_sum=z_sum,
        num_labels=(targets != IGNORE_INDEX).sum(),
        token_ce=token_ce.view_as(targets)[:, :-1],
    )
