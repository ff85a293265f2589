"""A run's record as training would leave it: a loss that falls, spikes, a restart that went back, evaluations."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

TOKENS_PER_STEP = 2048
START_TIME = 1.7e9


def metrics_row(step: int, launch: int, loss: float) -> dict[str, Any]:
    return {
        "step": step,
        "tokens": step * TOKENS_PER_STEP,
        "time": START_TIME + 2.0 * step + 1000 * launch,
        "train/CrossEntropyLoss": loss,
        "optim/total_grad_norm": 0.5 + 0.1 * math.sin(step),
        "optim/clipping_rate": 0.0,
        "optim/learning_rate_group0": 1e-3 * step,
        "optim/learning_rate_group1": 1e-3 * step,
        "optim/grad/model.layers.0.weight.norm": 0.25,
        "throughput/device/tokens_per_second": 1000.0,
        "throughput/device/mfu": 0.4,
        "throughput/time_share/data": 0.1,
    }


def write_lines(path: Path, rows: list[dict[str, Any]], end: str = "") -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + end)


def make_run(run_dir: Path, steps: int = 200, restart_at: int = 100, seed: int = 0) -> Path:
    """Steps 1 to 1.2 times `restart_at`, killed, taken up at `restart_at`, on to `steps`; the last line is torn."""
    run_dir.mkdir(parents=True)
    noise = np.random.default_rng(seed).normal(0, 0.02, max(steps, 2 * restart_at) + 1)
    rows: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []

    def event(step: int, launch: int, name: str, **details: Any) -> None:
        time = START_TIME + 2.0 * step + 1000 * launch
        events.append({"step": step, "tokens": step * TOKENS_PER_STEP, "time": time, "event": name, **details})

    def train(first: int, last: int, launch: int, offset: float) -> None:
        for step in range(first, last + 1):
            spike = 2.0 if step == 150 else 0.0
            row = metrics_row(step, launch, 2 + 5 * math.exp(-step / 30) + float(noise[step]) + offset + spike)
            rows.append(row)
            if step % 50 == 0:
                held_out = {"eval/c4/CrossEntropyLoss": row["train/CrossEntropyLoss"] + 0.1}
                held_out["eval/c4/Perplexity"] = math.exp(held_out["eval/c4/CrossEntropyLoss"])
                rows.append({key: row[key] for key in ("step", "tokens", "time")} | held_out)
                event(step, launch, "checkpoint")
            if spike:
                event(step, launch, "loss_spike", loss=row["train/CrossEntropyLoss"], z=20.0)

    event(0, 0, "start", max_steps=steps, world_size=2)
    train(1, int(1.2 * restart_at), 0, 0.0)
    event(restart_at, 1, "start", max_steps=steps, world_size=2)
    train(restart_at + 1, steps, 1, 0.001)
    write_lines(run_dir / "metrics.jsonl", rows, end='{"step": 201, "trai')
    write_lines(run_dir / "events.jsonl", events)
    launches: list[dict[str, Any]] = [{"time": "2026-11-30T00:00:00+00:00", "step": 0, "world_size": 2, "host": "a"}]
    launches.append({**launches[0], "step": restart_at, "changed": ["- old: 1", "+ old: 2"]})
    write_lines(run_dir / "launches.jsonl", launches)
    (run_dir / "config.yaml").write_text("name: <script>alert(1)</script>\ntraining:\n  learning_rate: 2.0e-3\n")
    return run_dir
