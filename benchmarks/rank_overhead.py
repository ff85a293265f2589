"""What two processes cost: tokens per second of DDP and FSDP2 on two cores against one process with two threads.

python benchmarks/rank_overhead.py [S M] [--ways ddp fsdp2 ...] [--steps 5] [--rounds 1]

The work is that of benchmarks/rivals/workloads.py, started by the launch lines of accelerate_configs/. Global batch
and micro-batches are the same, so that two processes have half as many micro-batches each. Shown are the medians
of the steps after the first. All processes share one memory bus and their messages go over loopback through the cores
that compute: the figures are about what the code adds, and say nothing about networks. The machine should be idle.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "rivals")]

from ours import configuration  # noqa: E402
from workloads import WORKLOADS, write_tokens  # noqa: E402

WARM_UP_STEPS = 1
TARGET = 0.9


@dataclass(frozen=True)
class Way:
    """How the two cores are used."""

    name: str
    accelerate_config: str
    processes: int
    words: tuple[str, ...] = ()


WAYS = {
    "one": Way("1 process, 2 threads", "cpu.yaml", 1),
    "ddp": Way("2 DDP", "cpu_ddp.yaml", 2),
    "fsdp2": Way("2 FSDP2", "cpu_fsdp2.yaml", 2),
    "grad": Way("2 FSDP2, shard grad op", "cpu_fsdp2_shard_grad_op.yaml", 2),
    "deferred": Way(
        "2 FSDP2, shard grad op, reduction deferred",
        "cpu_fsdp2_shard_grad_op.yaml",
        2,
        ("--training.defer_gradient_reduction=true",),
    ),
}


def train(way: Way, workload: str, steps: int) -> list[float]:
    """Seconds of the steady steps of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(WORKLOADS[workload], folder / "tokens.npy", steps=steps)
        (folder / "run.yaml").write_text(json.dumps(configuration(WORKLOADS[workload], str(folder), steps)))
        launcher = [str(Path(sys.executable).with_name("accelerate")), "launch"]
        settings = str(ROOT / "accelerate_configs" / way.accelerate_config)
        words = ["--config_file", settings, "train_hf.py", str(folder / "run.yaml"), *way.words]
        done = subprocess.run(
            [*launcher, *words],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(2 // way.processes), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        rows = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    marks = [row["time"] for row in rows if "train/CrossEntropyLoss" in row]
    return [after - before for before, after in zip(marks[WARM_UP_STEPS:], marks[WARM_UP_STEPS + 1 :], strict=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["S", "M"], help="of S, M, none")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="all ways in turns")
    given = parser.parse_args()
    missed = False
    for workload in given.workloads:
        found: dict[str, list[float]] = {name: [] for name in given.ways}
        for _ in range(given.rounds):
            for name in given.ways:
                found[name] += train(WAYS[name], workload, given.steps)
        print(f"## {workload}: {WORKLOADS[workload]}\n")
        print("| | s per step | fastest | tokens per second / those of one process | target |\n|---|---|---|---|---|")
        for name, seconds in found.items():
            median, share = statistics.median(seconds), ""
            if "one" in found and name != "one":
                ratio = statistics.median(found["one"]) / median
                missed |= ratio < TARGET
                share = f"{ratio:.3f} | {TARGET}"
            print(f"| {WAYS[name].name} | {median:.2f} | {min(seconds):.2f} | {share or ' | '} |", flush=True)
        print()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
