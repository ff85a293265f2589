"""`train_hf.py` with a file of the original: it says so, and trains."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.recipes.original import write

ROOT = Path(__file__).parent.parent.parent
STEPS = 3


def launch(directory: Path, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "train_hf.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=directory)


def original(directory: Path) -> Path:
    tokens = np.random.default_rng(0).integers(0, 490, 32 * 64, dtype=np.uint16)
    tokens.tofile(directory / "a.npy")
    changes = {
        "data": {"paths": ["a.npy"], "drop_last": True},
        "precision": "fp32",
        "tokenizer": {"identifier": None},
        "max_duration": STEPS,
        "model.flash_attention": False,
    }
    return write(directory, changes)


def test_it_trains_as_the_file_says(tmp_path):
    found = launch(tmp_path, str(original(tmp_path)), "--optimizer.learning_rate=5e-4")
    assert found.returncode == 0, found.stderr
    assert "a configuration of the original OLMo trainer, read as written" in found.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "small" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/CrossEntropyLoss" in line] == [1, 2, 3]
    assert (tmp_path / "out" / "small" / f"checkpoint-{STEPS}" / "model.safetensors").is_file()
    saved = (tmp_path / "out" / "small" / "config.yaml").read_text()
    assert "loss_denominator: batch_tokens" in saved
    assert "learning_rate: 0.0005" in saved


def test_a_dry_run_builds_everything_and_leaves_nothing(tmp_path):
    path = original(tmp_path)
    before = sorted(tmp_path.iterdir())
    found = launch(tmp_path, str(path), "--dry_run")
    assert found.returncode == 0, found.stderr
    assert "memory per device" in found.stdout
    assert sorted(tmp_path.iterdir()) == before
