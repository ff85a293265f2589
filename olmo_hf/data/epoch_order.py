"""Which instance stands at which place of an epoch: the original's order as pure functions, and two without a table.

Shapes: `N` instances of the data set, `P` places asked for.
"""

import numpy as np

FEISTEL_ROUNDS = 8
"""Rounds of the keyed bijection; four are the least for a sound one, and statistics are bad below that."""


def global_indices(num_instances: int, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The order in which an epoch reads the instances (spec: data.md section 4).

    PCG64 seeded with `seed + epoch` shuffles 0 ... N - 1 in place: whoever has NumPy can recompute it.

    Returns:
        Instance ids, shape (N,), uint32 (uint64 from 2**32 instances on).
    """
    dtype = np.uint32 if num_instances < 2**32 else np.uint64
    order = np.arange(num_instances, dtype=dtype)  # (N,)
    if shuffle:
        np.random.Generator(np.random.PCG64(seed + epoch)).shuffle(order)
    return order


def mix64(values: np.ndarray) -> np.ndarray:
    """Scrambles 64-bit numbers, of any shape, one to one (the finalizer of SplitMix64; Steele, Lea and Flood 2014)."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key64(*parts: int) -> np.uint64:
    """One 64-bit key from some integers, each of which changes all of it."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix64(key + np.array([part % 2**64], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return key[0]


def permuted(places: np.ndarray, num_instances: int, *, seed: int, epoch: int) -> np.ndarray:
    """Instances at some places of an epoch shuffled without a table.

    A Feistel network over the next power of four, keyed by seed and epoch, is a bijection of that range; a result
    outside the data set is sent through again until it lies inside (cycle walking; Black and Rogaway 2002), which
    keeps it a bijection of 0 ... N - 1. Any place of any size is computed at once.

    Args:
        places: Places in the epoch, shape (P,), each below `num_instances`.
        num_instances: N.
        seed: Seed of the order.
        epoch: Epoch.

    Returns:
        Instance ids, int64, shape (P,).
    """
    half_bits = np.uint64(max((num_instances - 1).bit_length() + 1, 2) // 2)
    low = np.uint64((1 << int(half_bits)) - 1)
    keys = [key64(seed, epoch, number) for number in range(FEISTEL_ROUNDS)]
    result = places.astype(np.uint64)  # (P,)
    outside = np.ones(result.shape, np.bool_)
    while outside.any():
        left, right = result[outside] >> half_bits, result[outside] & low
        for key in keys:
            left, right = right, left ^ (mix64(right ^ key) & low)
        result[outside] = (left << half_bits) | right
        outside = result >= np.uint64(num_instances)
    return result.astype(np.int64)


def drawn(places: np.ndarray, num_instances: int, *, seed: int) -> np.ndarray:
    """Instances drawn independently, with replacement, one for each place: the same place gives the same instance.

    Args:
        places: Places in the run, shape (P,).
        num_instances: N; the chance of each instance is 1 / N, up to N / 2**64.
        seed: Seed of the order.

    Returns:
        Instance ids, int64, shape (P,).
    """
    scrambled = mix64(mix64(places.astype(np.uint64) ^ key64(seed, 0)) + key64(seed, 1))  # (P,)
    return (scrambled % np.uint64(num_instances)).astype(np.int64)
