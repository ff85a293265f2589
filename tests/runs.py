"""Small real runs for tests that start processes: a configuration, a process that trains, what it left behind."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
STEPS = 12


def write_run(directory: Path, *, dropout: float = 0.1, label_masks: bool = False, **training: Any) -> Path:
    """Token files and a configuration of a run of `STEPS` steps over two and a bit epochs; returns the YAML.

    Args:
        directory: everything is written here.
        dropout: attention dropout, so that the random states matter.
        label_masks: whether each instance trains on another number of tokens, some on none.
        training: further settings of the `training` section.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(0, 100, 16 * 42 + 3, dtype=np.uint16)
    tokens.tofile(directory / "tokens.npy")
    settings: dict[str, Any] = {
        "name": "crash",
        "model": {
            "config": {
                "vocab_size": 128,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "attention_dropout": dropout,
                "eos_token_id": 0,
                "pad_token_id": 1,
            }
        },
        "data": {"paths": [str(directory / "tokens.npy")], "token_dtype": "uint16", "sequence_length": 16},
        "training": {
            "output_dir": str(directory / "run"),
            "max_duration": STEPS,
            "global_train_batch_size": 8,
            "per_device_train_batch_size": 2,
            "learning_rate": 0.01,
            "z_loss_weight": 1e-5,
            "scheduler": {"units": "tokens", "warmup": 256, "warmup_min_lr": 0.0},
            "save_interval": 6,
            "save_interval_ephemeral": 2,
            **training,
        },
        "callbacks": {"console": None},
    }
    if label_masks:
        lengths = np.random.default_rng(1).integers(0, 17, 42)  # labelled tokens of each instance
        mask = np.arange(16)[None, :] >= 16 - lengths[:, None]  # (instances, 16)
        np.concatenate([mask.ravel(), [True] * 3]).tofile(directory / "mask.npy")
        settings["data"]["label_mask_paths"] = [str(directory / "mask.npy")]
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def environment(**extra: str) -> dict[str, str]:
    """One thread, so that sums are made in one order."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", **extra}


def start(
    config: Path, *words: str, processes: int = 1, script: Path | None = None, **env: str
) -> subprocess.Popen[bytes]:
    """Start `train_hf.py`, alone or under torchrun."""
    program = [str(script if script is not None else ROOT / "train_hf.py"), str(config), *words]
    launcher = [sys.executable]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    log = open(config.parent / "log.txt", "ab")  # noqa: SIM115  (the child keeps it open)
    return subprocess.Popen(
        [*launcher, *program], env=environment(**env), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def run(config: Path, *words: str, processes: int = 1, timeout_seconds: float = 240, **env: str) -> str:
    """Train to the end; returns what was printed by all launches so far."""
    process = start(config, *words, processes=processes, script=None, **env)
    code = process.wait(timeout=timeout_seconds)
    text = (config.parent / "log.txt").read_text(errors="replace")
    assert code == 0, text[-4000:]
    return text


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The process and all its descendants: a launcher starts its ranks in sessions of their own."""
    parent = psutil.Process(process.pid)
    return [parent, *parent.children(recursive=True)]


def kill_when(
    process: subprocess.Popen[bytes], condition: Callable[[], bool], *, timeout_seconds: float = 120
) -> None:
    """`kill -9` the process and all its descendants as soon as the condition holds, and see them gone."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline, "the moment to kill never came"
        time.sleep(0.002)
    members = family(process)
    for member in members:  # the launcher first, so that it cannot start anything anew
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not alive, alive


def losses(run_dir: Path) -> dict[int, tuple[float, float, float]]:
    """Cross-entropy, gradient norm and learning rate by step; the last launch that logged a step wins."""
    found = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "train/CrossEntropyLoss" in row:
            keys = ("train/CrossEntropyLoss", "optim/total_grad_norm", "optim/learning_rate_group0")
            found[row["step"]] = tuple(row[key] for key in keys)
    return found


def logged_steps(run_dir: Path) -> list[int]:
    """Steps in the order in which they were logged; empty while there is no file."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [row["step"] for row in rows if "train/CrossEntropyLoss" in row]


def weights(run_dir: Path) -> dict[str, bytes]:
    """Final weights, as bytes."""
    tensors = load_file(run_dir / "latest" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def same_run(one: Path, other: Path, steps: Sequence[int] = range(1, STEPS + 1)) -> None:
    """Both runs logged the same numbers at every step and ended with the same weights, bit for bit."""
    a, b = losses(one), losses(other)
    different = {step: (a.get(step), b.get(step)) for step in steps if step not in a or a.get(step) != b.get(step)}
    assert not different
    assert weights(one) == weights(other)
