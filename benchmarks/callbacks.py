"""What the default callbacks cost per step, and how long it takes from asking a run to stop to its checkpoint.

python benchmarks/callbacks.py [--steps 240] [--block 10] [--skip-stopping]

On the architecture and batch of configs/tiny/cpu.yaml, on random tokens, all through `train_hf.py`. The callbacks are
taken out and put back every few steps of one run, so that both kinds of step see the same machine; the medians of
their times are compared. Beside it stands the time measured inside the callbacks' own hooks. Target: under 1 %.
"""

import argparse
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import yaml  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

import train_hf  # noqa: E402
from olmo_hf.training.callback import OlmoCallback  # noqa: E402
from olmo_hf.training.flow import SaveSchedule  # noqa: E402

HOOKS = ("on_instances", "collect_metrics", "on_step_begin", "on_substep_end", "on_pre_optimizer_step")
HOOKS += ("on_optimizer_step", "on_step_end", "on_log")
MODES = ("with", "without")


def write_config(directory: Path, *, steps: int, **callbacks: Any) -> Path:
    """configs/tiny/cpu.yaml on random tokens, without evaluation and without checkpoints in between."""
    settings = yaml.safe_load((ROOT / "configs" / "tiny" / "cpu.yaml").read_text())
    settings["data"]["paths"] = [str(directory / "tokens.npy")]
    settings["data"]["token_dtype"] = "uint16"
    settings["model"] = {"preset": "olmo2_tiny", "config": {"vocab_size": 4224, "eos_token_id": 0, "pad_token_id": 1}}
    settings["training"] |= {"output_dir": str(directory / "run"), "max_duration": steps, "save_interval": None}
    settings["training"] |= {"save_interval_ephemeral": None, "save_at_start": False}
    settings["evaluation"] = {"evaluators": []}
    settings["callbacks"] = callbacks
    tokens = np.random.default_rng(0).integers(2, 4096, 512 * 64, dtype=np.uint16)
    tokens.tofile(directory / "tokens.npy")
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


class Turns(TrainerCallback):
    """Takes the callbacks out of the trainer and puts them back, and times the steps."""

    def __init__(self, trainer: Any, block: int):
        self.seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        self.in_hooks: dict[str, float] = defaultdict(float)
        self._trainer, self._block = trainer, block
        handler = trainer.callback_handler
        self._all = list(handler.callbacks)
        ours = [one for one in self._all if isinstance(one, OlmoCallback) and not isinstance(one, SaveSchedule)]
        self._bare = [one for one in self._all if one not in ours]
        self._mode, self._in_block, self._mark = "with", 0, 0.0
        for one in ours:
            for hook in HOOKS:
                if getattr(type(one), hook) is not getattr(OlmoCallback, hook):
                    setattr(one, hook, self._timed(type(one).__name__, getattr(one, hook)))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = hook(*args, **kwargs)
            self.in_hooks[name] += time.perf_counter() - began
            return result

        return timed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self._in_block > 0 and state.global_step > 2 * self._block:  # not the step in which they were exchanged
            self.seconds[self._mode].append(now - self._mark)
        self._in_block += 1
        if self._in_block > self._block:
            self._in_block = 0
            self._mode = "without" if self._mode == "with" else "with"
            chosen = self._all if self._mode == "with" else self._bare
            self._trainer.callback_handler.callbacks = [*chosen, self]
            (gc.disable if self._mode == "with" else gc.enable)()  # as without the callback that collects
        self._mark = time.perf_counter()


def measure_overhead(steps: int, block: int) -> dict[str, Any]:
    """Medians of a step with and without, and the time in every callback's hooks per step."""
    original, found = train_hf.build_trainer, []

    def build(*args: Any, **kwargs: Any) -> Any:
        trainer = original(*args, **kwargs)
        found.append(Turns(trainer, block))
        trainer.add_callback(found[0])
        return trainer

    train_hf.build_trainer = build
    with tempfile.TemporaryDirectory() as directory:
        config = write_config(Path(directory), steps=steps)
        train_hf.main([str(config)])
    turns = found[0]
    medians = {mode: statistics.median(turns.seconds[mode]) for mode in MODES}
    counted = sum(len(values) for values in turns.seconds.values()) / 2
    halves = {m: [statistics.median(turns.seconds[m][half::2]) for half in (0, 1)] for m in MODES}
    return {
        "steps_of_each": {mode: len(turns.seconds[mode]) for mode in MODES},
        "median_step_seconds": medians,
        "overhead_percent": 100 * (medians["with"] / medians["without"] - 1),
        "same_kind_differs_percent": max(100 * abs(a / b - 1) for a, b in halves.values()),
        "in_hooks_percent": 100 * sum(turns.in_hooks.values()) / counted / medians["with"],
        "in_hooks_milliseconds": {name: 1e3 * value / counted for name, value in sorted(turns.in_hooks.items())},
    }


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in itertools.count():
        if condition():
            return
        time.sleep(0.002)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def measure_stop(way: str) -> dict[str, float]:
    """Seconds from a tag, a file or a signal to the whole checkpoint, and the length of a step."""
    from tests.callbacks.wandb_server import WandbServer

    server = WandbServer()
    with tempfile.TemporaryDirectory() as directory:
        poll = {"cancellation": {"wandb_poll_seconds": 1.0}}
        config, run_dir = write_config(Path(directory), steps=100_000, **poll), Path(directory) / "run"
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40, "WANDB_MODE": "online", "WANDB_SILENT": "true"}
        env |= {"WANDB_ENTITY": "someone", "WANDB_PROJECT": "project", "WANDB_FINISH_TIMEOUT": "5"}
        words = ["--training.report_to=[wandb]"] if way == "tag" else []
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "train_hf.py"), str(config), *words],
            env={**os.environ, **env, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: len(rows_of(run_dir / "metrics.jsonl")) >= 5 or process.poll() is not None)
        began = time.time()
        if way == "tag":
            server.tags = ["cancel"]
        elif way == "file":
            (run_dir / "CANCEL").touch()
        else:
            process.send_signal(signal.SIGTERM)
        code = process.wait()
        ended = time.time()
        times = [row["time"] for row in rows_of(run_dir / "metrics.jsonl")]
        saved = [row["time"] for row in rows_of(run_dir / "events.jsonl") if row["event"] == "checkpoint"]
    server.close()
    return {
        "to_checkpoint_seconds": saved[-1] - began,
        "to_exit_seconds": ended - began,
        "step_seconds": statistics.median(b - a for a, b in itertools.pairwise(times)),
        "exit_code": code,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240, help="of the run whose steps are compared")
    parser.add_argument("--block", type=int, default=10, help="steps between two exchanges")
    parser.add_argument("--skip-stopping", action="store_true", help="only the overhead")
    options = parser.parse_args()
    figures: dict[str, Any] = {"overhead": measure_overhead(options.steps, options.block)}
    if not options.skip_stopping:
        figures["stopping"] = {way: measure_stop(way) for way in ("signal", "file", "tag")}
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
