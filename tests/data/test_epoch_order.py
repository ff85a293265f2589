"""The order of an epoch against the original's lists and hashes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.data.epoch_order import (
    FEISTEL_ROUNDS,
    drawn,
    global_indices,
    key64,
    mix64,
    permuted,
)

FOLDER = Path(__file__).parents[1] / "golden" / "03_data_order"
SMALL = json.loads((FOLDER / "small.json").read_text())
RESHUFFLE = json.loads((FOLDER / "reshuffle.json").read_text())
LARGE = json.loads((FOLDER / "large.json").read_text())


def order_of(case: dict, epoch: int | None = None) -> np.ndarray:
    order = global_indices(
        case["dataset_size"],
        seed=case["seed"],
        epoch=case["epoch"] if epoch is None else epoch,
        shuffle=case.get("shuffle", True),
    )
    # The original's lists are cut, or filled up from the beginning, to a multiple of the ranks.
    ranks = case["world_size"]
    return np.resize(order, order.size // ranks * ranks if case["drop_last"] else -(-order.size // ranks) * ranks)


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"n{c['dataset_size']}-w{c['world_size']}-e{c['epoch']}")
def test_small_orders(case: dict) -> None:
    order = order_of(case)
    assert order.size == case["total_size"]
    assert order.tolist() == case["global_indices"]


@pytest.mark.parametrize("case", RESHUFFLE, ids=lambda c: f"n{c['dataset_size']}-file{c['with_work_dir']}")
def test_every_epoch_is_shuffled_anew(case: dict) -> None:
    assert order_of(case, 0).tolist() == case["epoch0"]
    assert order_of(case, 1).tolist() == case["after_reshuffle_1"]
    assert order_of(case, 2).tolist() == case["after_reshuffle_2"]
    assert order_of(case, 0)[case["global_batch_size"] :].tolist() == case["epoch0_start_index_is_one_batch"]
    if case["with_work_dir"]:
        # The original's file holds the epoch that was shuffled last.
        written = order_of(case, 2).astype("<u4").tobytes()
        assert hashlib.sha256(written).hexdigest() == case["global_indices_file_bytes_sha256"]


@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"n{c['dataset_size']}-w{c['world_size']}-{c['drop_last']}")
def test_large_orders_by_hash(case: dict) -> None:
    order = order_of(case)
    assert order.size == case["total_size"]
    assert order[:100].tolist() == case["first100"]
    assert order[-100:].tolist() == case["last100"]
    assert hashlib.sha256(order.astype("<u4").tobytes()).hexdigest() == case["sha256_of_uint32_le_bytes"]


@pytest.mark.parametrize("seed", [0, 6198])
def test_the_permutation_is_one_for_every_size(seed: int) -> None:
    for n in (*range(1, 300), 1_023, 1_024, 1_025, 65_537, 1_000_003):
        ids = permuted(np.arange(n), n, seed=seed, epoch=3)
        assert np.array_equal(np.sort(ids), np.arange(n)), n


def test_the_permutation_needs_no_table_at_any_size() -> None:
    n = 2**40 + 12_345
    places = np.array([0, 1, 2**33, n - 2, n - 1])
    ids = permuted(places, n, seed=1, epoch=0)
    assert np.unique(ids).size == 5
    assert ((ids >= 0) & (ids < n)).all()
    # One by one or together, the same.
    assert [permuted(places[i : i + 1], n, seed=1, epoch=0)[0] for i in range(5)] == ids.tolist()


def places_of(ids: np.ndarray, num_instances: int, *, seed: int, epoch: int) -> np.ndarray:
    """The permutation the other way: its rounds in reverse, written from their definition with Python's integers."""
    half = max((num_instances - 1).bit_length() + 1, 2) // 2
    low = (1 << half) - 1
    keys = [int(key64(seed, epoch, number)) for number in range(FEISTEL_ROUNDS)]

    def mixed(value: int) -> int:
        return int(mix64(np.array([value], np.uint64))[0])

    places = []
    for number in ids.tolist():
        while True:
            left, right = number >> half, number & low
            for key in reversed(keys):
                left, right = right ^ (mixed(left ^ key) & low), left
            number = (left << half) | right
            if number < num_instances:
                break
        places.append(number)
    return np.array(places)


@pytest.mark.parametrize("n", [300, 2**32 - 1, 2**32 + 1, 10**11 + 7, 2**61 + 3])
def test_every_instance_has_one_place_also_where_none_can_be_counted(n: int) -> None:
    """Above 2**32 nobody can list a permutation, but one that can be undone gives no instance twice."""
    places = np.random.default_rng(0).integers(0, n, 200)
    ids = permuted(places, n, seed=3, epoch=1)
    assert ((ids >= 0) & (ids < n)).all()
    assert np.array_equal(places_of(ids, n, seed=3, epoch=1), places)
    anywhere = np.random.default_rng(1).integers(0, n, 200)
    assert np.array_equal(permuted(places_of(anywhere, n, seed=3, epoch=1), n, seed=3, epoch=1), anywhere)


def test_the_permutation_looks_random_above_two_to_the_32() -> None:
    n = 2**33 + 12_345
    places = 2**32 - 50_000 + np.arange(100_000)
    ids = permuted(places, n, seed=5, epoch=0)
    assert np.unique(ids).size == places.size
    # Neighbouring places go everywhere: chi-square with 99 degrees of freedom exceeds 148.2 once in a thousand times.
    counts = np.histogram(ids, bins=100, range=(0, n))[0]
    assert ((counts - 1_000) ** 2 / 1_000).sum() < 148.2
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 5 / np.sqrt(places.size)
    # Every bit of an id is one as often as it is zero: five standard deviations.
    for bit in range(32):
        assert abs(np.count_nonzero(ids >> bit & 1) - 50_000) < 5 * np.sqrt(100_000) / 2, bit


def test_all_arrangements_of_four_are_equally_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    draws = 4_800
    for seed in range(draws):
        order = tuple(permuted(np.arange(4), 4, seed=seed, epoch=0).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    # Chi-square with 23 degrees of freedom exceeds 49.7 once in a thousand times.
    assert sum((c - 200) ** 2 / 200 for c in counts.values()) < 49.7


def test_the_permutation_looks_random() -> None:
    n = 200_000
    ids = permuted(np.arange(n), n, seed=5, epoch=0)
    # Where places of a tenth go: chi-square of a 10 x 10 table has 81 degrees of freedom, 126 once in a thousand.
    table = np.histogram2d(np.arange(n), ids, bins=10)[0]
    assert ((table - n / 100) ** 2 / (n / 100)).sum() < 126
    # Neighbours are unrelated, and so are the same places of two epochs: five standard deviations of a correlation.
    other = permuted(np.arange(n), n, seed=5, epoch=1)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(ids, other)[0, 1]) < 5 / np.sqrt(n)
    # Fixed points of a random permutation: one on average.
    assert np.count_nonzero(ids == np.arange(n)) < 10
    assert np.count_nonzero(ids == other) < 10
    # Runs up: 99,999.5 rises among the neighbours, standard deviation sqrt((n + 1) / 12) = 129.
    assert abs(np.count_nonzero(np.diff(ids) > 0) - (n - 1) / 2) < 5 * 129


def test_seed_and_epoch_do_not_stand_for_each_other() -> None:
    # In the shuffled order seed 5 epoch 1 is seed 6 epoch 0; here every pair is its own.
    orders = {tuple(permuted(np.arange(50), 50, seed=s, epoch=e).tolist()) for s in range(5) for e in range(5)}
    assert len(orders) == 25


def test_draws_are_uniform_and_repeatable() -> None:
    ids = drawn(np.arange(100_000), 1_000, seed=1)
    assert np.array_equal(drawn(np.array([99_999]), 1_000, seed=1), ids[-1:])
    counts = np.bincount(ids, minlength=1_000)
    # Chi-square with 999 degrees of freedom: mean 999, standard deviation 44.7.
    assert abs(((counts - 100) ** 2 / 100).sum() - 999) < 5 * 44.7
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 5 / np.sqrt(100_000)
    assert not np.array_equal(ids, drawn(np.arange(100_000), 1_000, seed=2))
