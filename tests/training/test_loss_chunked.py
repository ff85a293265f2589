"""Head and loss in one: equal to the plain loss for any chunk, without ever holding all logits."""

import itertools

import pytest
import torch

from olmo_hf.training.loss import causal_lm_loss_sums
from olmo_hf.training.loss_chunked import chunked_causal_lm_loss_sums

B, S, V, D = 4, 16, 128, 32
"""Batch, sequence, vocabulary (the last 28 are padding), width."""


def problem(seed=0, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, S, D, generator=generator)
    weight = torch.randn(V, D, generator=generator) / D**0.5
    labels = torch.randint(100, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < ignored] = -100
    return hidden, weight, labels


def run(loss, hidden, weight, factor=1.0):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    terms = loss(hidden, weight)
    (terms.total * factor).backward()
    return terms, hidden.grad, weight.grad


@pytest.mark.parametrize(
    ("chunk_tokens", "z_loss_weight", "logit_scale"),
    [*itertools.product([1, 7, 16, 64, 1000], [0.0, 1e-4], [1.0]), (7, 1e-4, D**-0.5)],
)
def test_equal_to_the_plain_loss(chunk_tokens, z_loss_weight, logit_scale):
    hidden, weight, labels = problem()

    def plain(h, w):
        return causal_lm_loss_sums(logit_scale * (h @ w.T), labels, z_loss_weight=z_loss_weight)

    def chunked(h, w):
        return chunked_causal_lm_loss_sums(
            h, w, labels, chunk_tokens=chunk_tokens, z_loss_weight=z_loss_weight, logit_scale=logit_scale
        )

    # Divided by the labels as in training, so that 1e-6 is absolute on gradients of size up to 1.
    factor = 1.0 / int((labels[:, 1:] != -100).sum())
    expected, expected_hidden, expected_weight = run(plain, hidden, weight, factor)
    terms, grad_hidden, grad_weight = run(chunked, hidden, weight, factor)
    for part in ("total", "ce_sum", "z_sum", "num_labels"):
        torch.testing.assert_close(getattr(terms, part), getattr(expected, part), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(terms.token_ce, expected.token_ce, rtol=1e-6, atol=1e-6)
    assert (grad_hidden - expected_hidden).abs().max() <= 1e-6
    assert (grad_weight - expected_weight).abs().max() <= 1e-6
    unlabelled = torch.cat([labels[:, 1:], torch.full((B, 1), -100)], dim=1) == -100
    assert torch.equal(grad_hidden[unlabelled], torch.zeros_like(grad_hidden[unlabelled]))


def test_a_bias_of_the_head():
    hidden, weight, labels = problem()
    biases = [torch.linspace(-1, 1, V).requires_grad_() for _ in range(2)]
    expected = causal_lm_loss_sums(0.5 * (hidden @ weight.T + biases[0]), labels, z_loss_weight=1e-2)
    terms = chunked_causal_lm_loss_sums(
        hidden, weight, labels, head_bias=biases[1], chunk_tokens=7, z_loss_weight=1e-2, logit_scale=0.5
    )
    torch.testing.assert_close(terms.total, expected.total, rtol=1e-6, atol=0.0)
    expected.total.backward()
    terms.total.backward()
    torch.testing.assert_close(biases[1].grad, biases[0].grad, rtol=1e-5, atol=1e-5)  # sums of 60 terms up to 1


def test_analytic_gradient_in_double_precision():
    # The sums are float32, so finite differences are taken of a float64 copy and agree to 1e-5.
    hidden, weight, labels = problem()
    _, grad_hidden, grad_weight = run(
        lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=5, z_loss_weight=1e-2), hidden, weight
    )
    hidden64, weight64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden64[:, :-1] @ weight64.T
    targets, labelled = labels[:, 1:].clamp(min=0), labels[:, 1:] != -100
    log_partition = logits.logsumexp(-1)
    picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    ((log_partition - picked + 1e-2 * log_partition.square()) * labelled).sum().backward()
    torch.testing.assert_close(grad_hidden.double(), hidden64.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_weight.double(), weight64.grad, rtol=1e-5, atol=1e-5)


def test_without_gradients_none_are_made():
    hidden, weight, labels = problem()
    with torch.no_grad():
        terms = chunked_causal_lm_loss_sums(hidden, weight.requires_grad_(), labels, chunk_tokens=8)
    assert not terms.total.requires_grad
    assert terms.ce_sum.item() == pytest.approx(causal_lm_loss_sums(hidden @ weight.T, labels).ce_sum.item(), rel=1e-6)


def test_a_frozen_head_or_a_frozen_body_gets_no_gradient():
    hidden, weight, labels = problem()
    weight.requires_grad_()
    chunked_causal_lm_loss_sums(hidden, weight, labels, chunk_tokens=8).total.backward()
    assert weight.grad is not None
    assert hidden.grad is None


def test_autocast_computes_the_head_in_bfloat16_and_everything_else_in_float32():
    hidden, weight, labels = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms, grad_hidden, grad_weight = run(
            lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=8, z_loss_weight=1e-4), hidden, weight
        )
        expected, _, _ = run(
            lambda h, w: causal_lm_loss_sums(torch.nn.functional.linear(h, w), labels, z_loss_weight=1e-4),
            hidden,
            weight,
        )
    assert terms.total.dtype == grad_hidden.dtype == grad_weight.dtype == torch.float32
    # The same bfloat16 logits go in, up to the order of summation inside a product: one rounding of 2**-9.
    assert terms.ce_sum.item() == pytest.approx(expected.ce_sum.item(), rel=2**-9)
    exact, _, _ = run(lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=8), hidden, weight)
    assert terms.ce_sum.item() != exact.ce_sum.item()  # bfloat16 was really used


def test_gradients_come_back_in_the_dtype_of_their_tensors():
    hidden, weight, labels = problem()
    _, grad_hidden, grad_weight = run(
        lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=8), hidden.bfloat16(), weight.bfloat16()
    )
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16


def test_all_logits_are_never_held(peak_bytes):
    vocabulary, width, positions, chunk = 8192, 16, 1024, 64
    hidden = torch.randn(2, positions // 2, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(vocabulary, (2, positions // 2))
    peak = peak_bytes(lambda: chunked_causal_lm_loss_sums(hidden, weight, labels, chunk_tokens=chunk).total.backward())
    all_logits = positions * vocabulary * 4
    # Two chunks' worth of logits and a few copies of the head's weight (1/64 of all logits each).
    assert peak < 0.35 * all_logits


def test_it_has_no_second_backward_pass():
    """The gradients are given away in place: a silent second pass would return their products with the first."""
    hidden, weight, labels = problem()
    total = chunked_causal_lm_loss_sums(hidden.requires_grad_(), weight, labels, chunk_tokens=8).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second backward pass"):
        total.backward()


def test_what_is_not_trained_on_may_be_infinite():
    hidden, weight, labels = problem()
    expected = run(lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=8), hidden, weight)
    targets = torch.cat([labels[:, 1:], torch.full((B, 1), -100)], dim=1)
    spoilt = torch.where((targets == -100).unsqueeze(-1), torch.inf, hidden)
    terms, grad_hidden, grad_weight = run(
        lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=8), spoilt, weight
    )
    assert torch.equal(terms.total, expected[0].total)
    assert torch.equal(grad_hidden, expected[1])
    assert torch.equal(grad_weight, expected[2])


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_large_logits_do_not_overflow(size):
    hidden, weight, labels = problem(ignored=0.0)
    hidden = hidden * size
    terms, grad_hidden, _ = run(lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=8), hidden, weight)
    expected = causal_lm_loss_sums(hidden @ weight.T, labels)
    torch.testing.assert_close(terms.ce_sum, expected.ce_sum, rtol=1e-6, atol=0.0)
    assert grad_hidden.isfinite().all()


def test_micro_batches_without_a_label_give_zeros():
    hidden, weight, labels = problem(ignored=1.1)
    terms, grad_hidden, grad_weight = run(
        lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=8, z_loss_weight=1e-2), hidden, weight
    )
    assert (terms.total.item(), int(terms.num_labels)) == (0.0, 0)
    assert not grad_hidden.any()
    assert not grad_weight.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_on_a_gpu_it_is_the_loss_of_the_cpu(autocast):
    hidden, weight, labels = problem()
    expected = run(
        lambda h, w: chunked_causal_lm_loss_sums(h, w, labels, chunk_tokens=7, z_loss_weight=1e-4), hidden, weight
    )
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        terms, *gradients = run(
            lambda h, w: chunked_causal_lm_loss_sums(h, w, labels.cuda(), chunk_tokens=7, z_loss_weight=1e-4),
            hidden.cuda(),
            weight.cuda(),
        )
    # float32: TF32 is off by default; bfloat16: one rounding of 2**-9 in every logit.
    bound = 2**-8 if autocast else 1e-5
    torch.testing.assert_close(terms.total.cpu(), expected[0].total, rtol=bound, atol=0.0)
    for gradient, exact in zip(gradients, expected[1:], strict=True):
        assert (gradient.cpu() - exact).abs().max() <= bound * exact.abs().max()
