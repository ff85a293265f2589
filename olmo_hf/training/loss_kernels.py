"""Losses in fused GPU kernels of other packages (flash-attn, liger), and which loss is used where.

Both kernels return a loss that already contains the z term; here it is taken out again, so that cross-entropy means
the same everywhere.

Shapes: `B` batch, `S` sequence, `V` vocabulary (padding included), `D` width.
"""

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal

import torch

from olmo_hf.errors import ConfigError
from olmo_hf.training.loss import IGNORE_INDEX, LossTerms, shifted_targets

LossImplementation = Literal["plain", "chunked", "flash", "liger"]

_NEEDS_HIDDEN_STATES = ("chunked", "liger")
_PACKAGES = {"flash": ("flash_attn", "flash-attn"), "liger": ("liger_kernel", "liger-kernel")}


def resolve_loss_implementation(name: str, *, device_type: str, gives_hidden_states: bool) -> LossImplementation:
    """What `training.loss_implementation` stands for here.

    `auto` is `chunked` where the model hands its last hidden states to the loss (ours does) and `plain` for any other
    model. It never picks a kernel of another package: those are asked for by name, and refused where they cannot run.

    Args:
        name: `auto`, `plain`, `chunked`, `flash` or `liger`.
        device_type: `cpu`, `cuda`, ...
        gives_hidden_states: whether the model can compute head and loss in one.

    Raises:
        ConfigError: the loss asked for cannot run here.
    """
    key = "training.loss_implementation"
    if name == "auto":
        return "chunked" if gives_hidden_states else "plain"
    if name in _NEEDS_HIDDEN_STATES and not gives_hidden_states:
        raise ConfigError(
            f"{key} is {name!r}, which computes head and loss in one, but this model returns finished logits only: "
            "use auto, plain or flash"
        )
    if name in _PACKAGES:
        module, package = _PACKAGES[name]
        missing = [pip for found, pip in ((module, package), ("triton", "triton")) if find_spec(found) is None]
        if device_type != "cuda" or missing:
            found = f"the device is {device_type}" if device_type != "cuda" else f"{' and '.join(missing)} is missing"
            raise ConfigError(
                f"{key} is {name!r}, which needs a CUDA device and the packages {package} and triton, but {found}: "
                "use auto, or install the extra `gpu` on a machine with a GPU"
            )
        return "flash" if name == "flash" else "liger"
    if name == "plain":
        return "plain"
    if name == "chunked":
        return "chunked"
    raise ConfigError(f"{key} is {name!r}, expected auto, plain, chunked, flash or liger")


def flash_causal_lm_loss_sums(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    z_loss_weight: float = 0.0,
    kernel: Callable[..., Any] | None = None,
) -> LossTerms:
    """Identical to `causal_lm_loss_sums` except that flash-attn's Triton kernel computes it.

    Args:
        logits: (B, S, V).
        labels: (B, S), not shifted.
        z_loss_weight: weight of the squared log-partition; 0.0 is off.
        kernel: `flash_attn.ops.triton.cross_entropy.cross_entropy_loss` unless given.
    """
    kernel = _flash_kernel() if kernel is None else kernel
    targets = shifted_targets(labels)  # (B, S)
    # The argument was `ignored_index` before flash-attn 2.5.8.
    spelling = "ignore_index" if _takes(kernel, "ignore_index") else "ignored_index"
    with_z, z_terms = kernel(
        logits.flatten(0, 1), targets.flatten(), lse_square_scale=z_loss_weight, **{spelling: IGNORE_INDEX}
    )
    token_ce = (with_z - z_terms).detach()  # (B * S,)
    return LossTerms(
        total=with_z.sum(),
        ce_sum=token_ce.sum(),
        z_sum=z_terms.detach().sum(),
        num_labels=(targets != IGNORE_INDEX).sum(),
        token_ce=token_ce.view_as(targets)[:, :-1],
    )


def liger_causal_lm_loss_sums(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    head_bias: torch.Tensor | None = None,
    z_loss_weight: float = 0.0,
    logit_scale: float = 1.0,
    kernel: Callable[..., Any] | None = None,
) -> LossTerms:
    """Identical to `chunked_causal_lm_loss_sums` except that liger's fused kernel computes it, in chunks of its own.

    Args:
        hidden: (B, S, D), what goes into the head.
        head_weight: (V, D).
        labels: (B, S), not shifted.
        head_bias: (V,), if the head has one.
        z_loss_weight: weight of the squared log-partition; 0.0 is off.
        logit_scale: factor on the logits.
        kernel: `liger_kernel.transformers.functional.liger_fused_linear_cross_entropy` unless given.
    """
    kernel = _liger_kernel() if kernel is None else kernel
    targets = shifted_targets(labels)  # (B, S)
    if logit_scale != 1.0:  # the kernel has no factor of its own
        hidden = hidden * logit_scale
        head_bias = None if head_bias is None else head_bias * logit_scale
    options: dict[str, Any] = {"accum_dtype": torch.float32} if _takes(kernel, "accum_dtype") else {}
    result = kernel(
        hidden.flatten(0, 1),
        head_weight,
        targets.flatten(),
        bias=head_bias,
        ignore_index=IGNORE_INDEX,
        lse_square_scale=z_loss_weight,
        reduction="sum",
        return_z_loss=True,
        **options,
    )
    # A pair in older releases, an object with names in newer ones.
    total, z_sum = result if isinstance(result, tuple) else (result.loss, result.z_loss)
    z_sum = z_sum.detach()
    return LossTerms(
        total=total,
        ce_sum=total.detach() - z_sum,
        z_sum=z_sum,
        num_labels=(targets != IGNORE_INDEX).sum(),
    )


def _flash_kernel() -> Callable[..., Any]:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return cross_entropy_loss


def _liger_kernel() -> Callable[..., Any]:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters
