"""Starts a run under FSDP and writes down how much memory that took: a part of benchmarks/start_memory.py.

python tests/measured_start.py OUTPUT CONFIG.yaml [--section.field=value ...]

Measured is the resident memory of this process: its peak from the moment before the model is built to the moment
before the first step, less what it had at the beginning. `MEASURED_START_UNTIL=end` runs to the end instead.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import yaml  # noqa: E402

import train_hf  # noqa: E402
from olmo_hf.training.restarting import RestartingTrainer  # noqa: E402
from tests import runs  # noqa: E402
from tests.invariants.test_split import FSDP  # noqa: E402

ALLOWANCE_BYTES = 48_000_000


def fields(width: int, layers: int, vocabulary: int) -> dict[str, int]:
    """A model of random weights."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(width // 64, 4),
        "eos_token_id": 0,
        "pad_token_id": 1,
    }


def measure(directory: Path, model: dict[str, int], ranks: int, *, restart: bool) -> int:
    """Largest growth over all ranks, in bytes."""
    config = runs.write_run(
        directory, dropout=0.0, max_duration=4, save_interval=1, save_interval_ephemeral=None, save_at_start=False
    )
    settings = yaml.safe_load(config.read_text())
    settings["model"]["config"] = model
    settings["training"]["optimizer"] = "adamw"
    config.write_text(yaml.safe_dump(settings))
    out = directory / "grown"

    def go(*words: str, **env: str) -> None:
        # `runs.start` hands its first word to the script: here where to write
        process = runs.start(out, *words, processes=ranks, script=Path(__file__), **FSDP, **env)
        assert process.wait(timeout=560) == 0, (directory / "log.txt").read_text()[-3000:]

    def words(*more: str) -> list[str]:
        return [str(config), *more]

    if restart:  # a sharded checkpoint, taken after the first step; the second one, at the end, is taken away
        go(*words("--training.stop_at=2"), MEASURED_START_UNTIL="end")
        last = directory / "run" / "checkpoint-2"
        (last / "manifest.json").unlink()
    go(*words())
    return max(json.loads(path.read_text()) for path in directory.glob("grown.rank*"))


class Started(Exception):
    """The measurement is over."""


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(key)


_build, _prepare = train_hf.build_model, RestartingTrainer._prepare_for_training
_before: list[int] = []


def _build_model(*args: Any, **kwargs: Any) -> Any:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    _before.append(resident("VmRSS"))
    return _build(*args, **kwargs)


def _prepare_for_training(self: Any, *args: Any, **kwargs: Any) -> Any:
    _prepare(self, *args, **kwargs)
    raise Started


def main() -> int:
    output, words = Path(sys.argv[1]), sys.argv[2:]
    if os.environ.get("MEASURED_START_UNTIL") == "end":
        return train_hf.run_and_report(train_hf.main, words)
    train_hf.build_model = _build_model
    RestartingTrainer._prepare_for_training = _prepare_for_training  # type: ignore[method-assign]
    try:
        train_hf.main(words)
    except Started:
        grown = resident("VmHWM") - _before[0]
        Path(f"{output}.rank{os.environ.get('RANK', '0')}").write_text(json.dumps(grown))
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
