"""Norm, rotation and gated activation with backward passes written out: in training they keep less and touch it less.

The forward passes give the bits of the formulas that they stand for. Autograd, left alone, would keep the result of
every factor and make a new tensor for every one of them.

Self-contained: torch only (this file travels beside checkpoints that stock transformers lacks).

Shapes in trailing comments: `B` batch, `S` positions, `H` heads, `C` head size, `D` size of the last axis.
"""

from typing import Any

import torch
from torch.nn import functional as F


def may_use_own_backward(x: torch.Tensor) -> bool:
    """Whether a gradient is wanted and nobody traces: compilers fuse the plain formulas themselves."""
    return x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _refuse_second_backward() -> None:
    """Gradient mode in a backward pass means that its own gradient is wanted; what was kept knows of none."""
    if torch.is_grad_enabled():
        raise RuntimeError("norm, rotation and gate have no second backward pass (create_graph=True)")


class RMSNorm(torch.autograd.Function):
    """`weight * x / rms(x)` over the last axis, in float32 (arXiv:1910.07467); keeps x and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        wide = x.float()  # (..., D)
        inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)  # (..., 1)
        ctx.save_for_backward(x, inverse, weight)
        normal = wide * inverse
        return (normal if weight is None else normal.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        _refuse_second_backward()
        x, inverse, weight = ctx.saved_tensors
        grad, normal = grad.float(), x.float() * inverse  # (..., D) both
        product, grad_weight = grad * normal, None
        if weight is None:
            mean = product.mean(-1, keepdim=True)  # (..., 1)
            product.copy_(grad)
        else:
            if ctx.needs_input_grad[1]:
                grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)  # (D,)
            mean = (product @ (weight.float() / weight.shape[0])).unsqueeze(-1)  # (..., 1)
            torch.mul(grad, weight, out=product)
        grad_x = product.sub_(normal.mul_(mean)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None


class Rotation(torch.autograd.Function):
    """Heads (B, H, S, C) turned by tables (B or 1, S, C) whose halves are alike; the way back is the other turn."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, way=1.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _refuse_second_backward()
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, way=-1.0), None, None


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, way: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    turned = wide * cos[:, None]  # (B, H, S, C)
    first, second = wide.chunk(2, dim=-1)
    sin = sin[:, None, :, : first.shape[-1]]  # (B, 1, S, C/2)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    turned_first.add_(second * sin, alpha=-way)
    turned_second.add_(first * sin, alpha=way)
    return turned.to(x.dtype)


class SwiGLU(torch.autograd.Function):
    """`silu(gate) * up` (arXiv:2002.05202), shapes alike; keeps gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _refuse_second_backward()
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
