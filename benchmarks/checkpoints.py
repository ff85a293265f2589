"""What a checkpoint costs: how long training stands still, how long a restart reads, against the machine's own limits.

    python benchmarks/checkpoints.py [--size M] [--rounds 3] [--directory /some/disk]

One run on one machine compares, for the same bytes: a raw write with and without sync, a copy in memory and a raw
read; this package's saving, at once and in the background; `Trainer`'s own saving, as it is and with a sync of its
files; and reading back by both. Then the time from launch to the first step of a run that starts afresh and of one
that goes on at 90 % of a long epoch. Ratios mean something, absolute numbers only beside each other. The best of the
rounds counts. `--size M` is about 70 million parameters with AdamW: 840 MB each time.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import yaml
from transformers import Trainer, TrainerState, TrainingArguments

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training import commit
from olmo_hf.training.checkpoints import restore_tensors
from olmo_hf.training.disk import Disk
from olmo_hf.training.rotation import Keep
from olmo_hf.training.saving import CheckpointSaver
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.state import RUN_STATE, RunState, load_run_state

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
            commit.sync_file(path)


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
    raw, target = memoryview(data.numpy()).cast("B"), torch.empty_like(data)
    keep = Keep(unsharded=1)
    now = CheckpointSaver(directory / "now", keep=keep, disk=Disk())
    later = CheckpointSaver(directory / "later", keep=keep, disk=Disk(), in_background=True)
    arguments = TrainingArguments(output_dir=str(directory / "trainer"), use_cpu=True, save_total_limit=1)
    trainer = Trainer(model=model, args=arguments)
    trainer.optimizer = optimizer
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
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
        note(
            "Trainer with sync",
            trained + seconds(lambda t=turn: sync_files(directory / "trainer" / f"checkpoint-{t}")),
        )  # type: ignore[misc]
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
    trainer.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)

    def read_files() -> None:
        for path in sorted(ours.rglob("*.safetensors")):
            read_raw(path)

    def by_trainer() -> None:
        trainer._load_from_checkpoint(str(theirs))
        trainer._load_optimizer_and_scheduler(str(theirs))

    ways: dict[str, Callable[[], object]] = {
        "raw read": read_files,
        "olmo_hf: verify": lambda: commit.verify(ours),
        "olmo_hf: restore": lambda: restore_tensors(ours, model, optimizer),
        "Trainer: restore": by_trainer,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    memory = dict.fromkeys(ways, 0)
    for _ in range(rounds):
        for name, action in ways.items():
            if name != "olmo_hf: restore":  # it comes after the verification, which has read the files
                forget(ours)
                forget(theirs)
            optimizer.state.clear()
            with extra_memory() as peak:
                found[name].append(seconds(action))
            memory[name] = max(memory[name], peak[0] - state_bytes(optimizer))
    return found, memory


def write_long_run(directory: Path, instances: int) -> Path:
    """A tiny model on a long epoch."""
    np.random.default_rng(0).integers(0, 100, 16 * instances, dtype=np.uint16).tofile(directory / "tokens.npy")
    settings = {
        "name": "launch",
        "model": {
            "config": {
                "vocab_size": 128,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "eos_token_id": 0,
                "pad_token_id": 1,
            }
        },
        "data": {"paths": [str(directory / "tokens.npy")], "token_dtype": "uint16", "sequence_length": 16},
        "training": {
            "output_dir": str(directory / "run"),
            "max_duration": "1ep",
            "global_train_batch_size": 8,
            "stop_after": 1,
        },
        "callbacks": {"console": None},
    }
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def launch(config: Path) -> float:
    """Seconds from launch to the end of the first step, by the record of the run."""
    metrics = config.parent / "run" / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.is_file() else 0
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train_hf.py"), str(config)],
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.DEVNULL,
    )
    while not metrics.is_file() or metrics.stat().st_size <= before:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with {process.returncode} before its first step")
        time.sleep(0.005)
    taken = time.perf_counter() - began
    if process.wait() != 0:
        raise RuntimeError(f"the run ended with {process.returncode}")
    return taken


def move_to(checkpoint: Path, instances: int) -> None:
    """Let a checkpoint say that so many instances of the epoch were read."""
    state = load_run_state(checkpoint)
    fields = asdict(state) | {"position": {"epoch": 0, "instances": instances}}
    (checkpoint / RUN_STATE).write_text(json.dumps(fields))
    manifest = commit.read_manifest(checkpoint)
    manifest.files.update(commit.describe_files(checkpoint, [RUN_STATE]))
    commit.write_manifest(checkpoint, manifest)


def launching(directory: Path, instances: int) -> dict[str, list[float]]:
    """Seconds from launch to the first step, afresh and at 90 % of the epoch."""
    directory.mkdir()
    config = write_long_run(directory, instances)
    fresh = launch(config)
    move_to((directory / "run" / "latest").resolve(), instances * 9 // 10 // 8 * 8)
    return {"launch to first step, afresh": [fresh], "launch to first step, at 90 %": [launch(config)]}


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--instances", type=int, default=1_000_000, help="instances of the long epoch")
    parser.add_argument("--directory", default=None, help="where to write; default: the system's temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        directory = Path(scratch)
        written = saving(directory, options.size, options.rounds)
        read, memory = restoring(directory, options.size, options.rounds)
        launched = launching(directory / "launch", options.instances)
        total = sum(path.stat().st_size for path in commit.list_checkpoints(directory / "now")[0].rglob("*"))
    print(f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}; {total:,} bytes a checkpoint\n")
    print(f"| {'what':46} | seconds | of raw write with sync | extra MB |\n|{'-' * 48}|---|---|---|")
    base = min(written["raw write with sync"])
    for name, values in {**written, **read, **launched}.items():
        share = f"{min(values) / base:.2f}" if name in written else ""
        extra = f"{memory[name] / 1e6:.0f}" if name in memory else ""
        print(f"| {name:46} | {min(values):.3f} | {share} | {extra} |")


if __name__ == "__main__":
    main()
