"""The plain loss against torch's own operations, its parts, its masks and its memory.

`naive_sums` is the oracle: slice, log_softmax in float64, gather. Tolerances are relative to float32's 6e-8.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from olmo_hf.training.loss import causal_lm_loss_sums, count_labels

B, S, V = 4, 16, 128
"""Batch, sequence, vocabulary."""


def naive_sums(logits, labels, z_loss_weight):
    """Cross-entropy sum and z sum in float64 by the textbook."""
    predicted, targets = logits[:, :-1].double().flatten(0, 1), labels[:, 1:].flatten()
    labelled = targets != -100
    ce_sum = F.cross_entropy(predicted, targets, ignore_index=-100, reduction="sum")
    z_sum = z_loss_weight * (predicted.logsumexp(-1).square() * labelled).sum()
    return ce_sum, z_sum, int(labelled.sum())


def random_batch(seed=0, ignored=0.3, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(B, S, V, generator=generator)
    labels = torch.randint(V, (B, S), generator=generator)
    labels[torch.rand(B, S, generator=generator) < ignored] = -100
    return logits, labels


@pytest.mark.parametrize("z_loss_weight", [0.0, 1e-5, 1e-2])
def test_values_and_gradient_equal_the_textbook(z_loss_weight):
    logits, labels = random_batch()
    logits.requires_grad_()
    terms = causal_lm_loss_sums(logits, labels, z_loss_weight=z_loss_weight)
    terms.total.backward()
    reference = logits.detach().double().requires_grad_()
    ce_sum, z_sum, num_labels = naive_sums(reference, labels, z_loss_weight)
    (ce_sum + z_sum).backward()
    assert terms.ce_sum.item() == pytest.approx(ce_sum.item(), rel=1e-6)
    assert terms.z_sum.item() == pytest.approx(z_sum.item(), rel=1e-6)
    assert terms.total.item() == pytest.approx((ce_sum + z_sum).item(), rel=1e-6)
    assert terms.num_labels.item() == num_labels
    assert (logits.grad - reference.grad).abs().max() <= 1e-6
    # What no target looks at has no gradient at all, the last position of a row included.
    unlabelled = F.pad(labels[:, 1:], (0, 1), value=-100) == -100
    assert torch.equal(logits.grad[unlabelled], torch.zeros_like(logits.grad[unlabelled]))


def test_an_upstream_factor_reaches_the_gradient():
    logits, labels = random_batch()
    logits.requires_grad_()
    terms = causal_lm_loss_sums(logits, labels, z_loss_weight=1e-4)
    (terms.total / 44 * 2).backward()
    once = logits.grad.clone()
    logits.grad = None
    causal_lm_loss_sums(logits, labels, z_loss_weight=1e-4).total.backward()
    torch.testing.assert_close(once, logits.grad * (2 / 44), rtol=1e-6, atol=1e-9)


def test_uniform_logits_give_the_logarithm_of_the_vocabulary():
    # 2 rows of 6 tokens: 10 targets. A denominator of 12 would show as 4.04336.
    labels = torch.randint(V, (2, 6), generator=torch.Generator().manual_seed(0))
    terms = causal_lm_loss_sums(torch.zeros(2, 6, V), labels, z_loss_weight=1.0)
    assert terms.num_labels.item() == count_labels(labels).item() == 10
    cross_entropy = (terms.ce_sum / terms.num_labels).item()
    assert cross_entropy == pytest.approx(math.log(V), abs=5e-7)
    assert (terms.z_sum / terms.num_labels).item() == pytest.approx(math.log(V) ** 2, abs=5e-6)
    assert math.exp(cross_entropy) == pytest.approx(128.0, rel=1e-6)


def test_z_per_label_does_not_depend_on_masks():
    labels = torch.randint(V, (2, 9), generator=torch.Generator().manual_seed(0))
    labels[:, 5:] = -100
    terms = causal_lm_loss_sums(torch.zeros(2, 9, V), labels, z_loss_weight=1e-5)
    assert (terms.z_sum / terms.num_labels).item() == pytest.approx(2.35422e-4, rel=1e-5)


def test_labels_are_shifted_once():
    # A model that knows the cycle 0, 1, 2, ... has no loss; shifted twice or not at all it has about 100.
    labels = (torch.arange(S) % 7).repeat(B, 1)
    logits = 100.0 * F.one_hot((labels + 1) % 7, V).float()
    assert causal_lm_loss_sums(logits, labels).ce_sum.item() == 0.0


def test_token_losses_add_up_and_are_zero_where_nothing_is_labelled():
    logits, labels = random_batch()
    terms = causal_lm_loss_sums(logits, labels)
    assert terms.token_ce.shape == (B, S - 1)
    assert terms.token_ce.sum().item() == pytest.approx(terms.ce_sum.item(), rel=1e-6)
    assert (terms.token_ce[labels[:, 1:] == -100] == 0).all()
    assert not terms.token_ce.requires_grad
    assert not terms.ce_sum.requires_grad


def test_a_batch_without_labels_is_zero_and_differentiable():
    logits = torch.randn(B, S, V, requires_grad=True)
    terms = causal_lm_loss_sums(logits, torch.full((B, S), -100), z_loss_weight=1e-4)
    terms.total.backward()
    assert (terms.total.item(), terms.num_labels.item()) == (0.0, 0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_infinities_in_rows_that_are_not_trained_on_do_no_harm():
    logits, labels = random_batch(ignored=0.0)
    labels[0] = -100
    logits[0] = float("nan")
    logits[1, -1] = float("inf")
    logits.requires_grad_()
    terms = causal_lm_loss_sums(logits, labels, z_loss_weight=1e-4)
    terms.total.backward()
    assert torch.isfinite(terms.total)
    assert torch.isfinite(logits.grad).all()


def test_a_nan_that_is_trained_on_shows():
    logits, labels = random_batch(ignored=0.0)
    logits[2, 3, 5] = float("nan")
    assert torch.isnan(causal_lm_loss_sums(logits, labels).ce_sum)


def test_half_precision_logits_are_summed_in_float32():
    logits, labels = random_batch()
    low = logits.bfloat16().requires_grad_()
    terms = causal_lm_loss_sums(low, labels, z_loss_weight=1e-4)
    exact = causal_lm_loss_sums(low.detach().float(), labels, z_loss_weight=1e-4)
    assert terms.ce_sum.dtype == terms.total.dtype == torch.float32
    assert terms.ce_sum.item() == exact.ce_sum.item()
    terms.total.backward()
    assert low.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_cut_of_the_batch_changes_nothing(chunks):
    logits, labels = random_batch()
    whole = causal_lm_loss_sums(logits, labels, z_loss_weight=1e-4)
    parts = [
        causal_lm_loss_sums(part, part_labels, z_loss_weight=1e-4)
        for part, part_labels in zip(logits.chunk(chunks), labels.chunk(chunks), strict=True)
    ]
    assert sum(part.total for part in parts).item() == pytest.approx(whole.total.item(), rel=1e-6)
    assert sum(part.num_labels for part in parts) == whole.num_labels


def test_memory_is_the_gradient_and_little_else(peak_bytes):
    vocabulary, positions = 8192, 1024
    logits = torch.randn(2, positions // 2, vocabulary, requires_grad=True)
    labels = torch.randint(vocabulary, (2, positions // 2))
    peak = peak_bytes(lambda: causal_lm_loss_sums(logits, labels, z_loss_weight=1e-4).total.backward())
    one_copy = logits.numel() * 4
    # The logits themselves are not counted: their gradient is one copy, and a quarter (256 of 1024 rows) is worked
    # on at a time, twice over. Together with the logits that stays below three copies.
    assert one_copy < peak < 1.8 * one_copy
