"""Instances per second through the loader, and time to the first batch deep inside a large order.

    python benchmarks/data_loading.py [--instances 200000] [--sequence-length 4096] [--original-python PYTHON]

Compares, in one run on one machine: bare slices of a memory map, a plain `DataLoader` over a memory map (the usual
twenty lines), the original trainer's data set, and this package's loader, without workers and with two. Ratios mean
something, absolute numbers only beside each other. The file is written to a temporary directory: 2 bytes a token.
Processor time, of all processes together, says more than seconds where other programs run beside it.

The original needs an environment of its own, with `pip install --no-deps ai2-olmo==0.6.0 'numpy<2' torch omegaconf
rich boto3 requests cached_path google-cloud-storage` and what these need; its Python is named by `--original-python`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
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


def processor_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def rate(batches: Iterable[object], instances: int) -> float:
    """Instances per second of one pass, the start of workers left out."""
    iterator = iter(batches)
    next(iterator)
    began = time.perf_counter()
    for _ in iterator:
        pass
    return instances / (time.perf_counter() - began)


ORIGINAL = """
import json, sys, time, resource
from olmo.data.collator import DataCollator
from olmo.data.iterable_dataset import IterableDataset
from olmo.data.memmap_dataset import MemMapDataset
from torch.utils.data import DataLoader
import numpy, torch
torch.set_num_threads(1)
path, length, batch, count, workers = sys.argv[1], *map(int, sys.argv[2:])
data = MemMapDataset(path, chunk_size=length, memmap_dtype=numpy.uint16, pad_token_id=1, eos_token_id=0)
order = IterableDataset(data, batch, seed=0, shuffle=True, drop_last=True, max_examples=count,
                        world_size=1, rank=0, fs_local_rank=0)
def spent():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

for _ in range(2):
    start = spent()
    loader = DataLoader(order, batch_size=batch, drop_last=True, collate_fn=DataCollator("right", 1),
                        num_workers=workers, prefetch_factor=2 if workers else None)
    iterator = iter(loader)
    next(iterator)
    began = time.perf_counter()
    for _ in iterator:
        pass
    speed = count / (time.perf_counter() - began)
    del iterator, loader
print(json.dumps([speed, (spent() - start) / count]))
"""


def original(python: str, path: str, length: int, count: int, workers: int) -> tuple[float, float]:
    """Instances per second through the original's data set, loader and collator, and processor seconds of each."""
    words = [python, "-c", ORIGINAL, path, *map(str, (length, MICRO_BATCH, count, workers))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{python} cannot run the original: see above")
    speed, spent = json.loads(done.stdout.splitlines()[-1])
    return float(speed), float(spent)


MANY_FILES = 10_000

MEMORY = """
import os, sys
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.order import DataPosition, OrderedDataset
paths = [f"{sys.argv[1]}/{i:05d}.npy" for i in range(int(sys.argv[2]))]
def resident():
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
before = resident()
data = MemMapDataset(paths, sequence_length=64, token_dtype="uint16")
order = OrderedDataset(data, seed=0, shuffle=True, global_batch_size=100, start=DataPosition())
opened = resident()
for first in range(0, len(data) - 100, 100):
    order.__getitems__(range(first, first + 100))
print(f"{opened - before:.1f} {resident() - before:.1f}")
"""


def memory_of_many_files(folder: Path) -> tuple[float, float]:
    """MiB that opening, and then reading all of, ten thousand files takes in a process of its own."""
    for number in range(MANY_FILES):
        np.zeros(64 * 16, np.uint16).tofile(folder / f"{number:05d}.npy")
    words = [sys.executable, "-c", MEMORY, str(folder), str(MANY_FILES)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    opened, read = map(float, done.stdout.split())
    return opened, read


def bare(path: str, length: int, count: int) -> float:
    tokens = np.memmap(path, np.uint16, "r")
    order = np.random.default_rng(0).permutation(len(tokens) // length)[:count].tolist()
    began = time.perf_counter()
    for i in order:
        torch.from_numpy(tokens[i * length : (i + 1) * length].astype(np.int64))
    return count / (time.perf_counter() - began)


FIRST = """
import sys
from benchmarks.data_loading import first_batch, peak_mib, resident_mib
before = resident_mib()
seconds = first_batch(*sys.argv[1:])
print(seconds, resident_mib() - before, peak_mib() - before)
"""


def resident_mib() -> float:
    """Memory of this process now, memory-mapped pages among it."""
    with open("/proc/self/statm") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def peak_mib() -> float:
    """The most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def first_batch(path: str, order: str, index_dir: str) -> float:
    """Seconds to the first batch at 90 % of the instances of a file, one token each."""
    dataset = MemMapDataset([path], sequence_length=1, token_dtype="uint8")
    began = time.perf_counter()
    ordered = OrderedDataset(
        dataset,
        seed=0,
        shuffle=True,
        global_batch_size=GLOBAL_BATCH,
        start=DataPosition(0, 90_000_384),
        order=order,  # type: ignore[arg-type]
        index_dir=index_dir or None,
    )
    next(iter(loader(ordered, 1, 0)))
    return time.perf_counter() - began


def report_first_batches(folder: Path) -> None:
    """Time and memory to the first batch 90 % into 100 million instances, each in a process of its own."""
    path, index = folder / "hundred-million.npy", str(folder / "index")
    np.zeros(100_000_000, np.uint8).tofile(path)
    for label, order, index_dir in (
        ("shuffle in memory", "shuffle", ""),
        ("shuffle on disk, made", "shuffle", index),
        ("shuffle on disk, there", "shuffle", index),
        ("permutation", "permutation", ""),
    ):
        words = [sys.executable, "-c", FIRST, str(path), order, index_dir]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        seconds, held, peak = map(float, done.stdout.split())
        print(f"first batch, {label:24} {seconds:8.3f} s, {held:6.0f} MiB held, {peak:6.0f} MiB at most", flush=True)


def loader(ordered: OrderedDataset, steps: int, workers: int) -> DataLoader:
    sampler = GlobalBatchSampler(
        steps=steps, global_batch_size=GLOBAL_BATCH, per_device_batch_size=MICRO_BATCH, rank=0, world_size=1
    )
    return DataLoader(ordered, batch_sampler=sampler, collate_fn=DataCollator(0), num_workers=workers)


def report(label: str, speed: float, spent: float, reference: float) -> None:
    print(
        f"{label:32} {speed:>10,.0f} instances/s  x {speed / reference:.2f}  "
        f"{1e6 * spent:8.1f} us of processor time each",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200_000)
    parser.add_argument("--sequence-length", type=int, default=4_096)
    parser.add_argument("--steps", type=int, default=20, help=f"global batches of {GLOBAL_BATCH} measured")
    parser.add_argument("--original-python", metavar="PYTHON", help="Python of an environment with ai2-olmo")
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
            began = processor_seconds()
            speed = measure()
            reference = speed if reference is None else reference
            report(label, speed, (processor_seconds() - began) / count, reference)
        if options.original_python is not None:
            assert reference is not None
            for workers in (0, 2):
                report(
                    f"the original, {workers} workers",
                    *original(options.original_python, path, length, count, workers),
                    reference,
                )
        report_first_batches(folder)
        opened, read = memory_of_many_files(folder)
        print(f"{MANY_FILES:,} files: {opened:.0f} MiB to open them, {read:.0f} MiB when all were read")


if __name__ == "__main__":
    main()
