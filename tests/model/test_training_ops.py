"""Backward passes written out, against autograd on the plain formulas in float64, and forward passes bit for bit."""

import pytest
import torch
from torch.nn import functional as F

from olmo_hf.model.training_ops import RMSNorm, Rotation, SwiGLU, may_use_own_backward

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Of the largest element: a few roundings in float32. Leaving out any one term changes results by a tenth or more."""


def plain_norm(x, weight, eps):
    wide = x.double() if x.dtype == torch.float64 else x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normal if weight is None else weight * normal).to(x.dtype)


def plain_rotation(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return (x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]).to(x.dtype)


def plain_swiglu(gate, up):
    return F.silu(gate) * up


def tables(length, size):
    angles = torch.arange(length)[None, :, None] / 3.0 ** torch.arange(size // 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def cases():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    heads = draw(2, 5, 3, 8).transpose(1, 2)  # as attention hands them over: not contiguous
    return {
        "norm": (RMSNorm, plain_norm, [draw(3, 5, 48) * 3, draw(48)], [1e-6]),
        "norm without weight": (RMSNorm, lambda x, eps: plain_norm(x, None, eps), [draw(3, 5, 48)], [1e-2]),
        "rotation": (Rotation, plain_rotation, [heads], list(tables(5, 8))),
        "swiglu": (SwiGLU, plain_swiglu, [draw(4, 33) * 4, draw(4, 33)], []),
    }


def run(function, inputs, constants, dtype):
    """Result and gradients, everything in `dtype` or, if that is None, as it is."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    rest = [c.to(dtype or c.dtype) if torch.is_tensor(c) else c for c in constants]
    out = function(*leaves, *rest)
    upstream = torch.linspace(-1, 2, out.numel()).view(out.shape)
    (out * upstream.to(out.dtype)).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves]


def own(name, function):
    if name == "norm without weight":
        return lambda x, eps: function.apply(x, None, eps)
    return function.apply


@pytest.mark.parametrize("name", list(cases()))
def test_forward_is_the_formula_bit_for_bit(name):
    function, plain, inputs, constants = cases()[name]
    assert torch.equal(own(name, function)(*inputs, *constants), plain(*inputs, *constants))


@pytest.mark.parametrize("name", list(cases()))
def test_gradients_are_those_of_autograd(name):
    function, plain, inputs, constants = cases()[name]
    _, found = run(own(name, function), inputs, constants, torch.float32)
    _, expected = run(plain, inputs, constants, torch.float64)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).abs().max() <= ROUNDING * exact.abs().max()


@pytest.mark.parametrize("name", ["norm", "rotation", "swiglu"])
def test_bfloat16_is_rounded_where_the_formula_rounds(name):
    """Norm and rotation compute in float32 and round once; the gate, as torch's own, at every product."""
    function, plain, inputs, constants = cases()[name]
    half = [x.to(torch.bfloat16) for x in inputs]
    if name == "norm":
        half[1] = inputs[1]  # masters stay in float32
    assert torch.equal(function.apply(*half, *constants), plain(*half, *constants))
    _, found = run(function.apply, half, constants, None)
    _, expected = run(plain, half, constants, torch.float64)
    for ours, exact in zip(found, expected, strict=True):
        assert (ours - exact).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_plain_formulas_stand_where_nothing_is_learned_or_a_compiler_looks():
    x = torch.ones(2, requires_grad=True)
    assert may_use_own_backward(x)
    assert not may_use_own_backward(x.detach())
    with torch.no_grad():
        assert not may_use_own_backward(x)
    compiled = torch.compile(lambda y: y * 2 if may_use_own_backward(y) else y * 3, backend="eager")
    assert compiled(x).tolist() == [3.0, 3.0]


def test_a_second_backward_pass_is_refused():
    function, _, inputs, constants = cases()["norm"]
    leaves = [x.requires_grad_() for x in inputs]
    out = function.apply(*leaves, *constants)
    with pytest.raises(RuntimeError, match="no second backward pass"):
        torch.autograd.grad(out.sum(), leaves, create_graph=True)
