"""A model's forward pass that ends in loss sums: from its logits, or with head and loss computed in one.

For the latter the head module is lent another `forward` for the length of one call. That way it works for our class
and for the stock ones alike, and under FSDP the head's weight is whole at that moment.

Shapes: `B` batch, `S` sequence, `D` width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from olmo_hf.training.loss import LossTerms, causal_lm_loss_sums
from olmo_hf.training.loss_chunked import chunked_causal_lm_loss_sums
from olmo_hf.training.loss_kernels import (
    LossImplementation,
    flash_causal_lm_loss_sums,
    liger_causal_lm_loss_sums,
    resolve_loss_implementation,
)

_PLAIN_HEADS = ("olmo_hf", "olmo2", "olmo")
"""Model types whose logits are the head's output, times a constant at most; others may cap or divide them."""

HeadLoss = Callable[..., LossTerms]
"""From (hidden, weight, head_bias=...) to loss terms."""


@dataclass(frozen=True)
class LossSettings:
    """How the loss of a run is computed."""

    implementation: LossImplementation
    """Already resolved."""

    z_loss_weight: float
    """Weight of the squared log-partition; 0.0 is off."""

    chunk_tokens: int
    """`chunked` only: positions whose logits exist at the same time."""


def bare_model(model: nn.Module) -> PreTrainedModel | None:
    """The Hugging Face model inside DDP and other wrappers, if there is one."""
    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def loss_settings(
    model: nn.Module, *, implementation: str, z_loss_weight: float, chunk_tokens: int, keep_head: bool = False
) -> LossSettings:
    """Decides on the loss of a run, once.

    Args:
        model: wrapped or not, on its device.
        implementation: `training.loss_implementation`.
        z_loss_weight: `training.z_loss_weight`.
        chunk_tokens: `training.loss_chunk_tokens`.
        keep_head: whether the head must run as it is: `torch.compile` would compile a lent forward at every step, and
            tensor parallelism spreads the head's weight.

    Raises:
        ConfigError: the implementation asked for cannot run here.
    """
    inner = bare_model(model)
    head = None if inner is None else inner.get_output_embeddings()
    lends = not keep_head and isinstance(head, nn.Linear) and inner is not None
    resolved = resolve_loss_implementation(
        implementation,
        device_type=next(model.parameters()).device.type,
        gives_hidden_states=bool(lends and inner is not None and inner.config.model_type in _PLAIN_HEADS),
    )
    return LossSettings(resolved, z_loss_weight, chunk_tokens)


def model_loss_sums(
    model: nn.Module, inputs: dict[str, Any], labels: torch.Tensor, settings: LossSettings
) -> tuple[LossTerms, Any]:
    """Runs the model and sums its token losses.

    Args:
        model: wrapped or not.
        inputs: what its forward takes, without labels.
        labels: (B, S), not shifted.
        settings: from `loss_settings`.

    Returns:
        The terms, and the model's output; its logits are there with `plain` and `flash` only.
    """
    z_loss_weight = settings.z_loss_weight
    if settings.implementation in ("plain", "flash"):
        outputs = model(**inputs)
        loss = causal_lm_loss_sums if settings.implementation == "plain" else flash_causal_lm_loss_sums
        return loss(outputs.logits, labels, z_loss_weight=z_loss_weight), outputs

    inner = bare_model(model)
    assert inner is not None, "loss_settings found a head"
    scale = _logit_scale(inner)

    def head_loss(hidden: torch.Tensor, weight: torch.Tensor, head_bias: torch.Tensor | None) -> LossTerms:
        options: dict[str, Any] = {"head_bias": head_bias, "z_loss_weight": z_loss_weight, "logit_scale": scale}
        if settings.implementation == "liger":
            return liger_causal_lm_loss_sums(hidden, weight, labels, **options)
        return chunked_causal_lm_loss_sums(hidden, weight, labels, chunk_tokens=settings.chunk_tokens, **options)

    with _head_that_computes(inner.get_output_embeddings(), head_loss, scale) as terms:
        outputs = model(**inputs)
    # The total is taken from the output, not from the head: wrappers hang their hooks on what the model returns.
    return replace(terms[0], total=outputs.logits.view(())), outputs


def _logit_scale(inner: PreTrainedModel) -> float:
    return inner.config.hidden_size**-0.5 if getattr(inner.config, "scale_logits", False) else 1.0


@contextmanager
def _head_that_computes(head: nn.Module, head_loss: HeadLoss, scale: float) -> Iterator[list[LossTerms]]:
    """For the length of a call the head returns the loss, shaped (1, 1, 1), in the place of logits.

    Divided by the factor that the model will put on it.
    """
    terms: list[LossTerms] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        terms.append(head_loss(hidden, head.weight, head_bias=head.bias))
        total = terms[0].total if scale == 1.0 else terms[0].total / scale
        return total.view(1, 1, 1)

    before = head.__dict__.get("forward")
    head.__dict__["forward"] = forward
    try:
        yield terms
    finally:
        if before is None:
            del head.__dict__["forward"]
        else:
            head.__dict__["forward"] = before
