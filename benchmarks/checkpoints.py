"""What a checkpoint costs: how long training stands still, how long a restart reads, against the machine's own limits.

    python benchmarks/checkpoints.py [--size M] [--rounds 3] [--directory /some/disk] [--original-python PYTHON]

One run on one machine compares, for the same bytes: a raw write with and without sync, a copy in memory and a raw
read; this package's saving, at once and in the background; `Trainer`'s own saving, as it is and with a sync of its
files; the original trainer's, where its Python is named; and reading back by all. A restart here compares all files
with the manifest while it reads them, which the others do not do. Ratios mean
something, absolute numbers only beside each other. The best of the rounds counts. `--size M` is about 70 million
parameters with AdamW: 840 MB each time.

The original needs an environment of its own, with `pip install --no-deps ai2-olmo==0.6.0 'numpy<2' torch omegaconf
rich boto3 requests cached_path google-cloud-storage safetensors` and what these need; its Python is named by
`--original-python`.
"""

import argparse
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import Trainer, TrainerState, TrainingArguments

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training import commit
from olmo_hf.training.checkpoints import restore_tensors
from olmo_hf.training.disk import Disk
from olmo_hf.training.rotation import Keep
from olmo_hf.training.saving import CheckpointSaver
from olmo_hf.training.settling import sync_file
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.state import RunState

ROOT = Path(__file__).parents[1]
SIZES = {"S": (128, 4, 2_000), "M": (512, 14, 25_000)}
"""Width, layers, vocabulary."""


def build(size: str) -> tuple[OlmoHfForCausalLM, torch.optim.AdamW]:
    """A model with an optimizer whose moments exist."""
    width, layers, vocabulary = SIZES[size]
    config = OlmoHfConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
    )
    model = OlmoHfForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.rand_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
    return model, optimizer


def seconds(action: Callable[[], object]) -> float:
    """Time of one action."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def write_raw(path: Path, data: memoryview, *, sync: bool) -> None:
    """Write the bytes as plainly as can be."""
    with open(path, "wb", buffering=0) as file:
        written = 0
        while written < len(data):
            written += file.write(data[written : written + (1 << 26)])
        if sync:
            os.fsync(file.fileno())


def read_raw(path: Path) -> None:
    """Read a file as plainly as can be."""
    buffer = memoryview(bytearray(1 << 26))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def sync_files(directory: Path) -> None:
    """Force all files of a directory to disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            sync_file(path)


def forget(directory: Path) -> None:
    """Ask the system to drop the directory's files from memory, so that reading them means the disk."""
    for path in [directory, *directory.rglob("*")]:
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextmanager
def extra_memory() -> Iterator[list[int]]:
    """Largest growth of the process's own memory meanwhile, in bytes, as the only element."""

    def own() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    start, peak, done = own(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], own() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def our_snapshot(model: OlmoHfForCausalLM, optimizer: torch.optim.AdamW, step: int) -> Snapshot:
    """What the trainer would save."""
    return Snapshot(
        model=model,
        optimizer=optimizer,
        run_state=RunState(step=step),
        trainer_state=TrainerState(global_step=step, train_batch_size=1),
    )


def touch_memory(size_bytes: int) -> None:
    """Have the machine provide memory once: in a virtual one the first use of a page costs more than a write to it."""
    available = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024
    np.ones(min(size_bytes, available // 2), dtype=np.uint8)


def saving(directory: Path, size: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way to write, by name."""
    model, optimizer = build(size)
    total = 3 * 4 * sum(parameter.numel() for parameter in model.parameters())
    touch_memory(8 * total)
    data = torch.rand(total // 4)
    raw, target = data.numpy().data.cast("B"), torch.empty_like(data)
    keep = Keep(unsharded=1)
    now = CheckpointSaver(directory / "now", keep=keep, disk=Disk())
    later = CheckpointSaver(directory / "later", keep=keep, disk=Disk(), in_background=True)
    arguments = TrainingArguments(output_dir=str(directory / "trainer"), use_cpu=True, save_total_limit=1)
    trainer = Trainer(model=model, args=arguments)
    trainer.optimizer = optimizer
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for turn in range(1, rounds + 1):
        note("raw write with sync", seconds(lambda: write_raw(directory / "raw", raw, sync=True)))
        (directory / "raw").unlink()
        note("raw write", seconds(lambda: write_raw(directory / "raw", raw, sync=False)))
        os.sync()
        note("copy in memory", seconds(lambda: target.copy_(data)))
        snapshot = our_snapshot(model, optimizer, turn)
        note("olmo_hf, at once", seconds(lambda s=snapshot: now.save(s, kind="unsharded", has_optimizer=True)))  # type: ignore[misc]
        standstill = seconds(lambda s=snapshot: later.save(s, kind="unsharded", has_optimizer=True))  # type: ignore[misc]
        note("olmo_hf, in the background: standstill", standstill)
        note("olmo_hf, in the background: until it is whole", standstill + seconds(later.wait))
        trainer.state.global_step = turn
        trained = seconds(lambda: trainer._save_checkpoint(model, None))
        note("Trainer", trained)
        theirs = directory / "trainer" / f"checkpoint-{turn}"
        note("Trainer with sync", trained + seconds(lambda path=theirs: sync_files(path)))  # type: ignore[misc]
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer's state, which a restart has to hold anyway."""
    return sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())


def restoring(directory: Path, size: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds and largest extra memory of every way to read what `saving` wrote."""
    ours = commit.list_checkpoints(directory / "now")[0]
    theirs = next((directory / "trainer").glob("checkpoint-*"))
    model, optimizer = build(size)
    trainer = Trainer(model=model, args=TrainingArguments(output_dir=str(directory / "other"), use_cpu=True))
    trainer.optimizer = optimizer
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def read_files() -> None:
        for path in sorted(ours.rglob("*.safetensors")):
            read_raw(path)

    def by_trainer() -> None:
        trainer._load_from_checkpoint(str(theirs))
        trainer._load_optimizer_and_scheduler(str(theirs))

    def by_us() -> None:
        found, _ = commit.newest_whole(ours.parent, tensors=False)
        assert found == ours
        restore_tensors(ours, model, optimizer)

    ways: dict[str, Callable[[], object]] = {
        "raw read": read_files,
        "olmo_hf: choose, restore and verify": by_us,
        "Trainer: restore": by_trainer,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    memory = dict.fromkeys(ways, 0)
    for _ in range(rounds):
        for name, action in ways.items():
            forget(ours)
            forget(theirs)
            optimizer.state.clear()
            with extra_memory() as peak:
                found[name].append(seconds(action))
            memory[name] = max(memory[name], peak[0] - state_bytes(optimizer))
    return found, memory


ORIGINAL = """
import json, sys, time, threading, os, pathlib
import torch, torch.distributed as dist
from olmo.checkpoint import FullCheckpointer
from olmo.config import ModelConfig, TrainConfig
from olmo.model import OLMo

directory, rounds, width, layers, vocabulary = sys.argv[1], *map(int, sys.argv[2:])
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
os.environ.update(LOCAL_WORLD_SIZE="1", NODE_RANK="0", FS_LOCAL_RANK="0")
dist.init_process_group("gloo")
config = TrainConfig(model=ModelConfig(d_model=width, n_layers=layers, n_heads=width // 64, mlp_hidden_size=8 * width,
    vocab_size=vocabulary, embedding_size=vocabulary, weight_tying=False, include_bias=False, rope=True,
    activation_type="swiglu", block_type="sequential", layer_norm_type="rms", init_device="cpu"), save_overwrite=True)
model = torch.nn.parallel.DistributedDataParallel(OLMo(config.model))
optimizer = torch.optim.AdamW(model.parameters())
for p in model.parameters():
    optimizer.state[p] = {"step": torch.tensor(1.0), "exp_avg": torch.rand_like(p), "exp_avg_sq": torch.rand_like(p)}
state_bytes = sum(t.numel() * 4 for state in optimizer.state.values() for t in state.values())
checkpointer = FullCheckpointer(config)

def own():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024

found = {"save": [], "sync": [], "restore": [], "memory": [], "bytes": sum(p.numel() for p in model.parameters()) * 12}
for turn in range(rounds):
    target = pathlib.Path(directory) / f"step{turn}"
    began = time.perf_counter()
    checkpointer.save_checkpoint(target, model, optimizer, {"step": turn})
    saved = time.perf_counter()
    for path in target.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    synced = time.perf_counter()
    optimizer.state.clear()
    start, peak, done = own(), [0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], own() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    again = time.perf_counter()
    checkpointer.restore_checkpoint(target, model, optimizer)
    found["restore"].append(time.perf_counter() - again)
    done.set()
    watcher.join()
    found["memory"].append(peak[0] - state_bytes)
    found["save"].append(saved - began)
    found["sync"].append(synced - began)
print(json.dumps(found))
"""


def original(python: str, directory: Path, size: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of the original's saving and reading back, and its largest extra memory."""
    words = [python, "-c", ORIGINAL, str(directory), str(rounds), *map(str, SIZES[size])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=directory)
    if done.returncode:
        raise SystemExit(f"{python} cannot run the original: see above")
    found = json.loads(done.stdout.splitlines()[-1])
    label = f"the original ({found['bytes']:,} bytes)"
    times = {
        label: found["save"],
        "the original with sync": found["sync"],
        "the original: restore": found["restore"],
    }
    return times, {"the original: restore": max(found["memory"])}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--original-python", metavar="PYTHON", help="Python of an environment with ai2-olmo")
    parser.add_argument("--directory", default=None, help="where to write; default: the system's temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        directory = Path(scratch)
        written = saving(directory, options.size, options.rounds)
        read, memory = restoring(directory, options.size, options.rounds)
        if options.original_python is not None:
            (directory / "original").mkdir()
            times, more = original(options.original_python, directory / "original", options.size, options.rounds)
            written |= {name: values for name, values in times.items() if name not in more}
            read |= {name: values for name, values in times.items() if name in more}
            memory |= more
        total = sum(path.stat().st_size for path in commit.list_checkpoints(directory / "now")[0].rglob("*"))
    print(f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}; {total:,} bytes a checkpoint\n")
    print(f"| {'what':46} | seconds | of raw write with sync | extra MB |\n|{'-' * 48}|---|---|---|")
    base = min(written["raw write with sync"])
    for name, values in {**written, **read}.items():
        share = f"{min(values) / base:.2f}" if name in written else ""
        extra = f"{memory[name] / 1e6:.0f}" if name in memory else ""
        print(f"| {name:46} | {min(values):.3f} | {share} | {extra} |")


if __name__ == "__main__":
    main()
