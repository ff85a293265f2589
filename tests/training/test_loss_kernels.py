"""Which loss runs where, and the words for the two kernels that need a GPU.

The kernels themselves need CUDA and are compared with the plain loss there (marked `gpu`). What is checked on every
machine is our side of the contract, with stand-ins that behave as the kernels are documented to: the loss they return
contains the z term, and the ignore argument has one of two spellings.
"""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from olmo_hf.errors import ConfigError
from olmo_hf.training.loss import causal_lm_loss_sums
from olmo_hf.training.loss_kernels import (
    flash_causal_lm_loss_sums,
    liger_causal_lm_loss_sums,
    resolve_loss_implementation,
)

B, S, V, D = 4, 16, 128, 32
"""Batch, sequence, vocabulary, width."""


def problem(seed=0):
    """Hidden states, head and labels, three in ten of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, S, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) / D**0.5
    labels = torch.randint(V, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < 0.3] = -100
    return hidden, weight, labels


@pytest.mark.parametrize(
    ("name", "gives_hidden_states", "expected"),
    [
        ("auto", True, "chunked"),
        ("auto", False, "plain"),
        ("plain", True, "plain"),
        ("plain", False, "plain"),
        ("chunked", True, "chunked"),
    ],
)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_runs(name, gives_hidden_states, expected, device_type):
    found = resolve_loss_implementation(name, device_type=device_type, gives_hidden_states=gives_hidden_states)
    assert found == expected


@pytest.mark.parametrize("name", ["flash", "liger"])
def test_kernels_are_refused_without_a_gpu(name):
    with pytest.raises(ConfigError) as caught:
        resolve_loss_implementation(name, device_type="cpu", gives_hidden_states=True)
    message = str(caught.value)
    assert f"training.loss_implementation is '{name}'" in message
    assert "the device is cpu" in message
    assert "use auto" in message


@pytest.mark.parametrize(("name", "module"), [("flash", "flash_attn"), ("liger", "liger_kernel")])
def test_kernels_are_refused_without_their_package(name, module):
    if find_spec(module) is not None:
        pytest.skip(f"{module} is installed here")
    with pytest.raises(ConfigError, match="is missing"):
        resolve_loss_implementation(name, device_type="cuda", gives_hidden_states=True)


@pytest.mark.parametrize("name", ["chunked", "liger"])
def test_fused_heads_are_refused_for_models_that_only_return_logits(name):
    with pytest.raises(ConfigError, match="finished logits only"):
        resolve_loss_implementation(name, device_type="cpu", gives_hidden_states=False)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="expected auto, plain, chunked, flash or liger"):
        resolve_loss_implementation("fast", device_type="cpu", gives_hidden_states=True)


def loss_with_z_inside(logits, labels, lse_square_scale, ignored):
    labelled = labels != ignored
    z_terms = lse_square_scale * logits.logsumexp(-1).square() * labelled
    losses = F.cross_entropy(logits, labels, ignore_index=ignored, reduction="none") + z_terms
    return losses, z_terms.detach()


def old_flash(logits, labels, label_smoothing=0.0, lse_square_scale=0.0, ignored_index=-1):
    return loss_with_z_inside(logits, labels, lse_square_scale, ignored_index)


def new_flash(logits, labels, label_smoothing=0.0, lse_square_scale=0.0, ignore_index=-1):
    return loss_with_z_inside(logits, labels, lse_square_scale, ignore_index)


@pytest.mark.parametrize("kernel", [old_flash, new_flash])
def test_flash_keeps_z_out_of_the_cross_entropy_and_once_in_the_gradient(kernel):
    hidden, weight, labels = problem()
    logits = (hidden @ weight.T).requires_grad_()
    terms = flash_causal_lm_loss_sums(logits, labels, z_loss_weight=1e-2, kernel=kernel)
    terms.total.backward()
    found, logits.grad = logits.grad, None
    expected = causal_lm_loss_sums(logits, labels, z_loss_weight=1e-2)
    expected.total.backward()
    for part in ("total", "ce_sum", "z_sum", "num_labels", "token_ce"):
        torch.testing.assert_close(getattr(terms, part), getattr(expected, part), rtol=1e-6, atol=1e-5)
    assert (found - logits.grad).abs().max() <= 1e-6


def test_liger_keeps_z_out_of_the_cross_entropy():
    hidden, weight, labels = problem()

    def kernel(hidden, weight, targets, bias, ignore_index, lse_square_scale, reduction, return_z_loss):
        assert reduction == "sum"
        assert return_z_loss
        losses, z_terms = loss_with_z_inside(hidden @ weight.T + bias, targets, lse_square_scale, ignore_index)
        return losses.sum(), z_terms.sum()

    bias = torch.linspace(-1, 1, V)
    terms = liger_causal_lm_loss_sums(
        hidden, weight, labels, head_bias=bias, z_loss_weight=1e-2, logit_scale=0.5, kernel=kernel
    )
    expected = causal_lm_loss_sums(0.5 * (hidden @ weight.T + bias), labels, z_loss_weight=1e-2)
    for part in ("total", "ce_sum", "z_sum", "num_labels"):
        torch.testing.assert_close(getattr(terms, part), getattr(expected, part), rtol=1e-6, atol=0.0)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash", "liger"])
def test_the_kernels_agree_with_the_plain_loss(name):
    try:
        resolve_loss_implementation(name, device_type="cuda", gives_hidden_states=True)
    except ConfigError as error:
        pytest.skip(str(error))
    hidden, weight, labels = (tensor.cuda() for tensor in problem())
    hidden.requires_grad_()
    if name == "flash":
        terms = flash_causal_lm_loss_sums(hidden @ weight.T, labels, z_loss_weight=1e-4)
    else:
        terms = liger_causal_lm_loss_sums(hidden, weight, labels, z_loss_weight=1e-4)
    terms.total.backward()
    found, hidden.grad = hidden.grad, None
    expected = causal_lm_loss_sums(hidden @ weight.T, labels, z_loss_weight=1e-4)
    expected.total.backward()
    for part in ("total", "ce_sum", "z_sum", "num_labels"):
        torch.testing.assert_close(getattr(terms, part), getattr(expected, part), rtol=1e-6, atol=0.0)
    assert (found - hidden.grad).abs().max() <= 1e-5
