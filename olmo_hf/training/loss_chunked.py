"""The language-model head and its loss in one, in chunks of positions: all logits are never held at once.

With a vocabulary of 100,352, the float32 logits of 4,096 positions are 1.6 GB; here they are made for a chunk of
positions at a time, and turned at once into the gradients of the hidden states and of the head's weight.

Shapes: `B` batch, `S` sequence, `N` = B * S positions, `C` positions of a chunk, `V` vocabulary (padding included),
`D` width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from olmo_hf.training.loss import (
    IGNORE_INDEX,
    LossTerms,
    logits_gradient_,
    shifted_targets,
    softmax_statistics,
    z_term,
)


@dataclass(frozen=True)
class _Head:
    """What the head does besides multiplying by its weight."""

    z_loss_weight: float
    chunk_tokens: int
    logit_scale: float
    compute_dtype: torch.dtype
    needs_gradient: bool


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and loss; the gradients for an upstream gradient of 1 are made in the forward pass and scaled later."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: _Head,
    ) -> tuple:
        device_type = hidden.device.type
        with torch.autocast(device_type, enabled=False):
            cast_weight = weight.to(head.compute_dtype)  # (V, D), once and not once per chunk
            grad_hidden = torch.empty_like(hidden) if head.needs_gradient else None
            # In float32 also under bfloat16: it sums over all positions of the micro-batch.
            grad_weight = torch.zeros_like(weight, dtype=torch.float32) if head.needs_gradient else None
            cast_bias = None if bias is None else bias.to(head.compute_dtype)  # (V,)
            with_bias = head.needs_gradient and bias is not None
            grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if with_bias else None
            statistics = []
            for start in range(0, hidden.shape[0], head.chunk_tokens):
                rows = slice(start, start + head.chunk_tokens)
                chunk = hidden[rows].to(head.compute_dtype)  # (C, D)
                logits = torch.nn.functional.linear(chunk, cast_weight, cast_bias).float()  # (C, V)
                if head.logit_scale != 1.0:
                    logits *= head.logit_scale
                log_partition, token_ce = softmax_statistics(logits, targets[rows])
                statistics.append((log_partition, token_ce))
                if grad_hidden is None or grad_weight is None:
                    continue
                gradient = logits_gradient_(logits, targets[rows], log_partition, z_loss_weight=head.z_loss_weight)
                if head.logit_scale != 1.0:
                    gradient *= head.logit_scale
                gradient = gradient.to(head.compute_dtype)
                grad_hidden[rows] = gradient @ cast_weight
                grad_weight += gradient.T @ chunk
                if grad_bias is not None:
                    grad_bias += gradient.sum(dim=0, dtype=torch.float32)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        all_ce = torch.cat([token_ce for _, token_ce in statistics])  # (N,)
        ce_sum = all_ce.sum()
        z_sum = z_term(torch.cat([log_partition for log_partition, _ in statistics]), head.z_loss_weight)
        ctx.mark_non_differentiable(ce_sum, z_sum, all_ce)
        return ce_sum + z_sum, ce_sum, z_sum, all_ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, *_: torch.Tensor) -> tuple:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        # Multiplied on the device: asking whether the factor is 1 would wait for it.
        return (
            grad_hidden * grad_total,
            (grad_weight * grad_total).to(ctx.weight_dtype),
            None if grad_bias is None else (grad_bias * grad_total).to(ctx.weight_dtype),
            None,
            None,
        )


def chunked_causal_lm_loss_sums(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int,
    head_bias: torch.Tensor | None = None,
    z_loss_weight: float = 0.0,
    logit_scale: float = 1.0,
) -> LossTerms:
    """Identical to `causal_lm_loss_sums(logit_scale * (hidden @ head_weight.T + head_bias), labels)` but for memory.

    Under FSDP it must be called inside the model's forward pass, where the head's weight is whole.

    Args:
        hidden: (B, S, D), what goes into the head.
        head_weight: (V, D).
        labels: (B, S), not shifted; -100 is not trained on.
        head_bias: (V,), if the head has one.
        chunk_tokens: positions whose logits exist at the same time; any positive number gives the same result.
        z_loss_weight: weight of the squared log-partition; 0.0 is off.
        logit_scale: factor on the logits.
    """
    targets = shifted_targets(labels)  # (B, S)
    device_type = hidden.device.type
    autocast = torch.is_autocast_enabled(device_type)
    head = _Head(
        z_loss_weight=z_loss_weight,
        chunk_tokens=chunk_tokens,
        logit_scale=logit_scale,
        compute_dtype=torch.get_autocast_dtype(device_type) if autocast else hidden.dtype,
        needs_gradient=torch.is_grad_enabled()
        and any(tensor is not None and tensor.requires_grad for tensor in (hidden, head_weight, head_bias)),
    )
    total, ce_sum, z_sum, token_ce = _LinearCrossEntropy.apply(
        hidden.flatten(0, 1), head_weight, head_bias, targets.flatten(), head
    )
    return LossTerms(
        total=total,
        ce_sum=ce_sum,
        z_sum=z_sum,
        num_labels=(targets != IGNORE_INDEX).sum(),
        token_ce=token_ce.view_as(targets)[:, :-1],
    )
