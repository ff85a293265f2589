"""The language-model head and its loss in one, in chunks of positions: all logits are never held at once.

With a vocabulary of 100,352, the float32 logits of 4,096 positions are 1.6 GB; here they are made for a chunk of
positions at a time, and turned at once into the gradients of the hidden states and of the head's weight.

Shapes: `B` batch, `S` sequence, `N` = B * S positions, `C` positions of a chunk, `V` vocabulary (padding included),
`D` width.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from olmo_hf.training.loss import (
    IGNORE_INDEX,
    LossTerms,
    shifted_targets,
    z_term,
)

_CACHED_LOGITS = 800_000
"""Logits that a CPU works on at a time: 3 MB, within the second-level caches of a few cores (measured best)."""


@dataclass(frozen=True)
class _Head:
    """What the head does besides multiplying by its weight."""

    z_loss_weight: float
    chunk_tokens: int
    logit_scale: float
    compute_dtype: torch.dtype
    grad_enabled: bool


def _chunk_memory(rows: int, columns: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Room for the logits of a chunk, (C, V). On a CPU it is kept for the next call: only new memory costs there.

    Tensors without memory, with which a step is planned, must not meet a later step.
    """
    if like.device.type != "cpu" or type(like) is not torch.Tensor:
        return like.new_empty(rows, columns, dtype=dtype)
    return _kept_chunk_memory(rows, columns, dtype)


@lru_cache(maxsize=1)
def _kept_chunk_memory(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):  # made in an evaluation, it must do for training too
        return torch.empty(rows, columns, dtype=dtype)


class _Products:
    """The three matrix products of a chunk, into memory that is taken once for all chunks.

    In float32 the products write where the result is wanted, and the weight's gradient is added to where it lies; in
    lower precision it is kept in float32, because it sums over all positions of the micro-batch.
    """

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, head: _Head):
        self._scale, self._dtype = head.logit_scale, head.compute_dtype
        self._weight = weight.to(self._dtype)  # (V, D), once and not once per chunk
        self._bias = None if bias is None else bias.to(self._dtype)  # (V,)
        rows = min(head.chunk_tokens, hidden.shape[0])
        self._computed = _chunk_memory(rows, weight.shape[0], self._dtype, hidden)  # (C, V)
        self._in_float32 = self._dtype == torch.float32
        self._logits = (
            self._computed if self._in_float32 else self._computed.new_empty(self._computed.shape, dtype=torch.float32)
        )

    def logits(self, chunk: torch.Tensor) -> torch.Tensor:
        """(C, D) -> (C, V), float32, in memory that the next chunk takes over."""
        computed, logits = self._computed[: chunk.shape[0]], self._logits[: chunk.shape[0]]
        if self._bias is None:
            computed.addmm_(chunk, self._weight.T, beta=0.0, alpha=self._scale)
        else:
            torch.addmm(self._bias, chunk, self._weight.T, beta=self._scale, alpha=self._scale, out=computed)
        return logits if self._in_float32 else logits.copy_(computed)

    def gradient(self, logits: torch.Tensor) -> torch.Tensor:
        """The gradient that stands in the place of `logits`, in the precision of the products."""
        computed = self._computed[: logits.shape[0]]
        return logits if self._in_float32 else computed.copy_(logits)

    def add_grad_hidden(self, gradient: torch.Tensor, out: torch.Tensor) -> None:
        """(C, V) -> (C, D), written to `out`."""
        if out.dtype == self._dtype:
            out.addmm_(gradient, self._weight, beta=0.0, alpha=self._scale)
        else:
            out.copy_(gradient @ self._weight).mul_(self._scale)

    def add_grad_weight(self, gradient: torch.Tensor, chunk: torch.Tensor, out: torch.Tensor, *, first: bool) -> None:
        """(C, V) and (C, D) -> (V, D), added to `out`, which is float32; the first chunk is written to it."""
        if self._dtype == torch.float32:
            out.addmm_(gradient.T, chunk, beta=0.0 if first else 1.0, alpha=self._scale)
        elif first:
            out.copy_(gradient.T @ chunk).mul_(self._scale)
        else:
            out.add_(gradient.T @ chunk, alpha=self._scale)


def _parts(logits: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Chunks (C, V) and (C,) as they are, and on a CPU cut up further: six passes over what its cache holds."""
    rows = logits.shape[0] if logits.device.type != "cpu" else max(1, _CACHED_LOGITS // logits.shape[1])
    return zip(logits.split(rows), targets.split(rows), strict=True)


def _statistics_and_gradient_(
    logits: torch.Tensor, targets: torch.Tensor, *, z_loss_weight: float, needs_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax_statistics`, and in the place of the logits their gradient: one exponential of each, no copy of all.

    Args:
        logits: (C, V), float32 and finite; overwritten, by the gradient if that is wanted.
        targets: (C,).
        z_loss_weight: 0.0 is no z term.
        needs_gradient: whether the gradient is wanted; it is exactly 0 in rows without a target.

    Returns:
        (C,) log-partition, (C,) cross-entropy; both 0 where there is no target.
    """
    labelled = (targets != IGNORE_INDEX).unsqueeze(-1)  # (C, 1)
    columns = targets.unsqueeze(-1).masked_fill(~labelled, 0)  # (C, 1)
    target_logits = logits.gather(-1, columns)  # (C, 1)
    largest = logits.amax(dim=-1, keepdim=True)  # (C, 1)
    sums = logits.sub_(largest).exp_().sum(dim=-1, keepdim=True)  # (C, 1)
    log_partition = largest + sums.log()  # (C, 1)
    if needs_gradient:
        factor = (1.0 + 2.0 * z_loss_weight * log_partition) / sums
        logits.mul_(factor.masked_fill(~labelled, 0.0))  # softmax, with the z term's share
        logits.scatter_add_(-1, columns, -labelled.to(logits.dtype))
    cross_entropy = (log_partition - target_logits).masked_fill(~labelled, 0.0)
    return log_partition.masked_fill(~labelled, 0.0).squeeze(-1), cross_entropy.squeeze(-1)


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
        for_hidden, for_weight, for_bias = (head.grad_enabled and needed for needed in ctx.needs_input_grad[:3])
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.empty_like(weight, dtype=torch.float32) if for_weight else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if for_bias else None
        needs_gradient = for_hidden or for_weight or for_bias
        statistics = []
        with torch.autocast(hidden.device.type, enabled=False):
            products = _Products(hidden, weight, bias, head)
            # What is not trained on may hold anything, also infinities; it is left out here, where it is small.
            left_out = (targets == IGNORE_INDEX).unsqueeze(-1)  # (N, 1)
            for start in range(0, hidden.shape[0], head.chunk_tokens):
                rows = slice(start, start + head.chunk_tokens)
                chunk = hidden[rows].to(head.compute_dtype).masked_fill(left_out[rows], 0.0)  # (C, D)
                logits = products.logits(chunk)  # (C, V)
                statistics += [
                    _statistics_and_gradient_(
                        part, part_targets, z_loss_weight=head.z_loss_weight, needs_gradient=needs_gradient
                    )
                    for part, part_targets in _parts(logits, targets[rows])
                ]
                if not needs_gradient:
                    continue
                if grad_bias is not None:
                    grad_bias.add_(logits.sum(dim=0), alpha=head.logit_scale)
                gradient = products.gradient(logits)
                if grad_hidden is not None:
                    products.add_grad_hidden(gradient, grad_hidden[rows])
                if grad_weight is not None:
                    products.add_grad_weight(gradient, chunk, grad_weight, first=start == 0)
        ctx.gradients = (grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        all_ce = torch.cat([token_ce for _, token_ce in statistics])  # (N,)
        ce_sum = all_ce.sum()
        z_sum = z_term(torch.cat([log_partition for log_partition, _ in statistics]), head.z_loss_weight)
        ctx.mark_non_differentiable(ce_sum, z_sum, all_ce)
        return ce_sum + z_sum, ce_sum, z_sum, all_ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, *_: torch.Tensor) -> tuple:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the chunked loss gives its gradients away: it has no second backward pass")
        # Multiplied on the device: asking whether the factor is 1 would wait for it. In place: a copy of the weight's
        # gradient would be the largest thing in memory but one.
        grad_hidden, *others = (None if gradient is None else gradient.mul_(grad_total) for gradient in gradients)
        grad_weight, grad_bias = (None if gradient is None else gradient.to(ctx.weight_dtype) for gradient in others)
        return grad_hidden, grad_weight, grad_bias, None, None


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
        grad_enabled=torch.is_grad_enabled(),
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
