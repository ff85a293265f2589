"""Instances per second through the loader, and time to the first batch deep inside a large order.

    python benchmarks/data_loading.py [--instances 200000] [--sequence-length 4096]

Compares, in one run on one machine: bare slices of a memory map, a plain `DataLoader` over a memory map (the usual
twenty lines), and this package's loader, without workers and with two. Ratios mean something, absolute numbers only
beside each other. The file is written to a temporary directory: 2 bytes a token.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from olmo_hf.data.collator import DataCollator
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.order import DataPosition, OrderedDataset
from olmo_hf.data.sampler import GlobalBatchSampler

GLOBAL_BATCH = 1_024
MICRO_BATCH = 32


class PlainMemmap(Dataset):
    """What is usually written by hand."""

    def __init__(self, path: str, length: int):
        self.tokens, self.length = np.memmap(path, np.uint16, "r"), length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index * self.length : (index + 1) * self.length]
        ids = torch.from_numpy(row.astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def rate(batches: Iterable[object], instances: int) -> float:
    """Instances per second of one pass, the start of workers left out."""
    iterator = iter(batches)
    next(iterator)
    began = time.perf_counter()
    for _ in iterator:
        pass
    return instances / (time.perf_counter() - began)


def bare(path: str, length: int, count: int) -> float:
    tokens = np.memmap(path, np.uint16, "r")
    order = np.random.default_rng(0).permutation(len(tokens) // length)[:count].tolist()
    began = time.perf_counter()
    for i in order:
        torch.from_numpy(tokens[i * length : (i + 1) * length].astype(np.int64))
    return count / (time.perf_counter() - began)


def first_batch(folder: Path, order: str, index_dir: str | None) -> float:
    """Seconds to the first batch at 90 % of 100 million instances."""
    path = folder / "hundred-million.npy"
    if not path.exists():
        np.zeros(100_000_000, np.uint8).tofile(path)
    dataset = MemMapDataset([str(path)], sequence_length=1, token_dtype="uint8")
    began = time.perf_counter()
    ordered = OrderedDataset(
        dataset,
        seed=0,
        shuffle=True,
        global_batch_size=GLOBAL_BATCH,
        start=DataPosition(0, 90_000_384),
        order=order,  # type: ignore[arg-type]
        index_dir=index_dir,
    )
    next(iter(loader(ordered, 1, 0)))
    return time.perf_counter() - began


def loader(ordered: OrderedDataset, steps: int, workers: int) -> DataLoader:
    sampler = GlobalBatchSampler(
        steps=steps, global_batch_size=GLOBAL_BATCH, per_device_batch_size=MICRO_BATCH, rank=0, world_size=1
    )
    return DataLoader(ordered, batch_sampler=sampler, collate_fn=DataCollator(0), num_workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200_000)
    parser.add_argument("--sequence-length", type=int, default=4_096)
    parser.add_argument("--steps", type=int, default=20, help=f"global batches of {GLOBAL_BATCH} measured")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder, length = Path(name), options.sequence_length
        path = str(folder / "tokens.npy")
        rng = np.random.default_rng(0)
        with open(path, "wb") as stream:
            for _ in range(options.instances):
                rng.integers(0, 50_000, length, np.uint16).tofile(stream)
        dataset = MemMapDataset([path], sequence_length=length, token_dtype="uint16")
        ordered = OrderedDataset(dataset, seed=0, shuffle=True, global_batch_size=GLOBAL_BATCH, start=DataPosition())
        count = options.steps * GLOBAL_BATCH
        ids = ordered.instance_ids(0, count).reshape(-1, MICRO_BATCH).tolist()
        ways: dict[str, Callable[[], float]] = {
            "bare slices of a memory map": lambda: bare(path, length, count),
            "plain DataLoader, no workers": lambda: rate(
                DataLoader(PlainMemmap(path, length), batch_sampler=ids), count
            ),
            "olmo_hf, no workers": lambda: rate(loader(ordered, options.steps, 0), count),
            "plain DataLoader, 2 workers": lambda: rate(
                DataLoader(PlainMemmap(path, length), batch_sampler=ids, num_workers=2), count
            ),
            "olmo_hf, 2 workers": lambda: rate(loader(ordered, options.steps, 2), count),
        }
        reference = None
        for label, measure in ways.items():
            measure()  # the second pass finds the page cache as the others do
            value = measure()
            reference = value if reference is None else reference
            print(f"{label:32} {value:>10,.0f} instances/s  x {value / reference:.2f}")
        index = str(folder / "index")
        for label, order, index_dir in (
            ("shuffle in memory", "shuffle", None),
            ("shuffle on disk, made", "shuffle", index),
            ("shuffle on disk, there", "shuffle", index),
            ("permutation", "permutation", None),
        ):
            print(f"first batch, {label:24} {first_batch(folder, order, index_dir):8.3f} s")


if __name__ == "__main__":
    main()
