"""Which instance stands at which place of an epoch: the original's order as pure functions.

Shapes: `N` instances of the data set.
"""

import numpy as np


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


def even_out(order: np.ndarray, *, world_size: int, drop_last: bool) -> np.ndarray:
    """Cuts or pads an order so that every rank gets the same number of instances.

    Args:
        order: Instance ids, shape (N,).
        world_size: Number of ranks.
        drop_last: Cut the end; otherwise instances from the beginning are appended, again and again if needed.
    """
    if drop_last:
        return order[: order.size // world_size * world_size]
    return np.resize(order, -(-order.size // world_size) * world_size)


def rank_indices(
    order: np.ndarray, *, rank: int, world_size: int, start_index: int = 0, max_examples: int | None = None
) -> np.ndarray:
    """What one rank reads of an order (spec: data.md section 5): cut, skip, then every `world_size`-th instance.

    Raises:
        ValueError: `max_examples` is no multiple of the number of ranks.
    """
    if max_examples is not None:
        if max_examples % world_size:
            raise ValueError(f"max_examples {max_examples} is no multiple of the {world_size} ranks")
        order = order[:max_examples]
    return order[start_index:][rank::world_size]
