"""How long a launch takes until its first step is done: afresh, and taken up again deep inside a long epoch.

    python benchmarks/launch.py [--instances 1000000] [--rounds 3]

The run is tiny and the epoch long, so that anything that had to be read or skipped on the way to 90 % would show. The
best of the rounds counts; reading the checkpoint again is measured by itself, for it is what a restart may cost more.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import yaml

from olmo_hf.training import commit
from olmo_hf.training.settling import describe_files
from olmo_hf.training.state import RUN_STATE, load_run_state

ROOT = Path(__file__).parents[1]


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
    manifest.files.update(describe_files(checkpoint, [RUN_STATE]))
    commit.write_manifest(checkpoint, manifest)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instances", type=int, default=1_000_000, help="instances of the epoch")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[float]] = {"afresh": [], "at 90 % of the epoch": [], "reading the checkpoint": []}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(options.rounds):
            directory = Path(scratch) / str(turn)
            directory.mkdir()
            config = write_long_run(directory, options.instances)
            found["afresh"].append(launch(config))
            checkpoint = (directory / "run" / "latest").resolve()
            move_to(checkpoint, options.instances * 9 // 10 // 8 * 8)
            began = time.perf_counter()
            commit.verify(checkpoint)
            found["reading the checkpoint"].append(time.perf_counter() - began)
            found["at 90 % of the epoch"].append(launch(config))
    print("| launch to first step | seconds |\n|---|---|")
    for name, values in found.items():
        print(f"| {name} | {min(values):.3f} |")


if __name__ == "__main__":
    main()
