"""What half precision costs, measured against the same weights in float64.

Statement: with weights in bf16 or fp16, or under autocast, the error of the logits is a few times the rounding step of
the format relative to the largest logit, the loss keeps three digits, norms, RoPE and softmax work in fp32 inside.
"""

import copy

import pytest
import torch
from safetensors.torch import load_file

from tests.model.tiny import OLMO1, SHAPES, tiny_model, token_ids
from tests.parity.original import GOLDEN, load_variant

EPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def reference(model, ids):
    """fp64 weights and arithmetic outside the places that work in fp32 whatever comes in (norms, RoPE tables)."""
    with torch.no_grad():
        return copy.deepcopy(model).double()(ids)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_close_to_fp64(shape):
    model, ids = tiny_model(**SHAPES[shape]), token_ids(2, 48)
    expected = reference(model, ids).logits.float()
    with torch.no_grad():
        difference = (model(ids).logits - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision_weights(shape, dtype):
    model, ids = tiny_model(**SHAPES[shape]), token_ids(2, 48)
    expected = reference(model.to(dtype), ids).logits.float()  # the same, already rounded, weights
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()
    scale = expected.abs().max()
    assert (logits.float() - expected).abs().max() <= 16 * EPS[dtype] * scale
    assert (logits.float() - expected).pow(2).mean().sqrt() <= 3 * EPS[dtype] * scale


@pytest.mark.parametrize("shape", SHAPES)
def test_autocast_keeps_the_residual_stream_in_fp32(shape):
    model, ids = tiny_model(**SHAPES[shape]), token_ids(2, 48)
    expected = reference(model, ids).logits.float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model(ids, output_hidden_states=True, labels=ids)
    assert out.logits.dtype == torch.bfloat16
    assert out.hidden_states[1].dtype == torch.float32
    assert out.loss.dtype == torch.float32
    assert (out.logits.float() - expected).abs().max() <= 16 * EPS[torch.bfloat16] * expected.abs().max()


def test_low_precision_norm_follows_autocast():
    norms = {kind: tiny_model(**OLMO1 | {"norm_type": kind}).model.norm for kind in ("layer", "low_precision_layer")}
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(norms["layer"](x), norms["low_precision_layer"](x))
    with torch.autocast("cpu", torch.bfloat16):
        exact, rounded = norms["layer"](x), norms["low_precision_layer"](x)
    assert torch.equal(exact, norms["layer"](x))
    assert rounded.dtype == x.dtype
    assert torch.equal(rounded, torch.nn.functional.layer_norm(x.bfloat16(), (32,), eps=1e-5).float())
    assert not torch.equal(rounded, exact)


def test_rope_in_full_precision_or_not():
    full, half = (tiny_model(rope_full_precision=flag).bfloat16() for flag in (True, False))
    positions = torch.arange(64)[None]
    assert full.model.rotary_emb(positions, torch.bfloat16)[0].dtype == torch.float32
    assert half.model.rotary_emb(positions, torch.bfloat16)[0].dtype == torch.bfloat16
    ids = token_ids(2, 64)
    assert not torch.equal(full(ids).logits, half(ids).logits)


@pytest.mark.parametrize("name", sorted({key.split(".")[0] for key in load_file(GOLDEN / "bf16.safetensors")}))
def test_bf16_of_the_original(name):
    """The original's bf16 logits are 0.01 to 0.06 from its fp32 ones; two bf16 runs may differ that much."""
    stored = load_file(GOLDEN / "bf16.safetensors")
    variant = load_variant(name)
    with torch.no_grad():
        exact = variant.model(variant.input_ids).logits
        with torch.autocast("cpu", torch.bfloat16):
            logits = {"autocast": variant.model(variant.input_ids).logits.float()}
        logits["pure"] = copy.deepcopy(variant.model).bfloat16()(variant.input_ids).logits.float()
    for kind, ours in logits.items():
        theirs = stored[f"{name}.{kind}_bf16_logits"].float()
        spread = (theirs - exact).abs().max()
        assert (ours - exact).abs().max() <= 2 * spread
        assert (ours - theirs).abs().max() <= 3 * spread
