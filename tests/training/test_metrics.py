"""Sums that are read once, perplexity that knows no z, and losses by source."""

import math

import pytest
import torch

from olmo_hf.training.loss import causal_lm_loss_sums
from olmo_hf.training.metrics import UNITS, MetricSums, SourceSums, perplexity

B, S, V = 4, 9, 128


def zero_head(seed=0):
    """A model that knows nothing: cross-entropy ln 128, z ln(128) squared."""
    generator = torch.Generator().manual_seed(seed)
    return torch.zeros(B, S, V), torch.randint(V, (B, S), generator=generator)


def add_loss(sums, terms, denominator):
    """One forward pass, as the trainer adds it: divided by the tokens of the global batch."""
    sums.add(ce=terms.ce_sum / denominator, z=terms.z_sum / denominator, num_labels=terms.num_labels)


def test_cross_entropy_and_perplexity_never_contain_z():
    logits, labels = zero_head()
    sums = MetricSums()
    for rows in range(0, B, 2):  # two micro-batches of one step
        terms = causal_lm_loss_sums(logits[rows : rows + 2], labels[rows : rows + 2], z_loss_weight=1.0)
        add_loss(sums, terms, denominator=B * (S - 1))
    taken = sums.take()
    assert taken["ce"] == pytest.approx(4.852030, abs=1e-6)
    assert taken["z"] == pytest.approx(23.5422, abs=1e-4)
    assert taken["num_labels"] == B * (S - 1)
    assert perplexity(taken["ce"]) == pytest.approx(128.0, rel=1e-6)


def test_taking_starts_again():
    sums = MetricSums()
    assert sums.take() == {}
    sums.add(steps=1, ce=torch.tensor(2.0))
    sums.add(steps=1, ce=torch.tensor(3.0))
    assert sums.take() == {"ce": 5.0, "steps": 2.0}
    assert sums.take() == {}


def test_sums_are_kept_in_double_precision():
    sums = MetricSums()
    sums.add(x=torch.tensor(1e8))
    for _ in range(3):
        sums.add(x=torch.tensor(0.25))
    assert sums.take() == {"x": 1e8 + 0.75}


def test_perplexity_of_a_lost_model():
    assert perplexity(1000.0) == math.inf
    assert perplexity(0.0) == 1.0


def test_losses_by_source():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, S, V, generator=generator)
    labels = torch.randint(V, (B, S), generator=generator)
    labels[1, 4:] = -100
    sources = torch.tensor([2, 0, 2, 0])
    sums = SourceSums(["wiki", "books", "code"])
    assert sums.take() == {}
    for rows in (slice(0, 3), slice(3, 4)):
        terms = causal_lm_loss_sums(logits[rows], labels[rows])
        sums.add(terms.token_ce, labels[rows], sources[rows])
    taken = sums.take()
    assert set(taken) == {"train/source/wiki/CrossEntropyLoss", "train/source/code/CrossEntropyLoss"}
    for name, number in (("wiki", 0), ("code", 2)):
        chosen = sources == number
        expected = torch.nn.functional.cross_entropy(
            logits[chosen, :-1].flatten(0, 1), labels[chosen, 1:].flatten(), ignore_index=-100
        )
        assert taken[f"train/source/{name}/CrossEntropyLoss"] == pytest.approx(expected.item(), rel=1e-6)
    assert sums.take() == {}


def unequal_ranks(rank):
    logits, labels = zero_head()
    labels[2:, 2:] = -100  # rank 1 has one labelled target per row, rank 0 has eight
    share = slice(2 * rank, 2 * rank + 2)
    terms = causal_lm_loss_sums(logits[share], labels[share], z_loss_weight=1.0)
    sums, sources = MetricSums(), SourceSums(["a", "b"])
    add_loss(sums, terms, denominator=18)
    sources.add(terms.token_ce, labels[share], torch.tensor([rank, rank]))
    return {**sums.take(), **sources.take()}


def test_ranks_with_unequal_labels_agree(two_ranks):
    one, other = two_ranks(unequal_ranks)
    assert one == other
    assert one["ce"] == pytest.approx(math.log(128), abs=1e-6)
    assert one["num_labels"] == 18
    for source in "ab":
        assert one[f"train/source/{source}/CrossEntropyLoss"] == pytest.approx(math.log(128), abs=1e-6)


def test_every_metric_has_a_unit():
    assert all(meaning.strip() for meaning in UNITS.values())
    assert {"train/CrossEntropyLoss", "train/ZLoss", "train/Perplexity", "optim/total_grad_norm"} <= set(UNITS)
