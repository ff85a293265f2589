"""Shuffled orders kept on disk: made once per machine, memory-mapped by every process on it, used again when they fit.

A file is the raw little-endian table of ids, as the original's `global_indices.npy`. Its name says the number of
instances and the seed, on which alone the content depends, so a file that is there and whole is right.
"""

import fcntl
import logging
import os
from pathlib import Path

import numpy as np

from olmo_hf.data.epoch_order import global_indices
from olmo_hf.errors import DataError

logger = logging.getLogger(__name__)

MAX_IN_MEMORY = 2**24
"""Instances whose order is held in memory (64 MiB) when no directory is named."""


def default_index_dir(num_instances: int) -> str | None:
    """Where tables go when no directory is named: nowhere when small, else where Hugging Face's libraries cache."""
    if num_instances <= MAX_IN_MEMORY:
        return None
    home = os.environ.get("HF_HOME", os.path.join("~", ".cache", "huggingface"))
    return os.path.join(os.path.expanduser(home), "olmo_hf", "order")


def open_index(folder: str, num_instances: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch, memory-mapped, made first if it is not there.

    Of many processes one makes it and the others wait.

    Returns:
        Instance ids, shape (N,), read-only.

    Raises:
        DataError: The directory cannot be written.
    """
    dtype = np.dtype("<u4") if num_instances < 2**32 else np.dtype("<u8")
    path = Path(folder) / f"order-n{num_instances}-seed{seed + epoch}.u{dtype.itemsize * 8}"
    try:
        if not _is_whole(path, num_instances * dtype.itemsize):
            path.parent.mkdir(parents=True, exist_ok=True)
            # The lock ends with its process, however that ends.
            with open(path.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(path, num_instances * dtype.itemsize):
                    _make(path, num_instances, seed=seed, epoch=epoch)
        return np.asarray(np.memmap(path, dtype, "r", shape=(num_instances,)))
    except OSError as error:
        raise DataError(
            f"{path}: the order of the instances cannot be kept there ({error.strerror or error}); set data.index_dir "
            f"to a local directory with {num_instances * dtype.itemsize:,} free bytes"
        ) from error


def _is_whole(path: Path, size_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == size_bytes


def _make(path: Path, num_instances: int, *, seed: int, epoch: int) -> None:
    logger.info("making the order of %s instances in %s", f"{num_instances:,}", path)
    order = global_indices(num_instances, seed=seed, epoch=epoch)
    hidden = path.with_name(f".{path.name}.part")
    with open(hidden, "wb") as stream:
        order.tofile(stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(hidden, path)
