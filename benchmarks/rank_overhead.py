"""What two processes cost: the time of a step with DDP and FSDP2 against half the time of one process.

python benchmarks/rank_overhead.py [--steps 14]

One thread per process, the same global batch, four micro-batches of one rank. Shown is the median over the steps after
the fourth, and the processor time of a step over all processes, which a busy machine hardly changes: two runs of
different lengths, subtracted. Both processes share one memory bus and their messages go over loopback, so the figures
are upper bounds of what the code adds, and say nothing about networks.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import runs  # noqa: E402
from tests.invariants.test_split import FSDP  # noqa: E402
from tests.served import Ranks  # noqa: E402

LENGTH, BATCH, WARM = 256, 16, 4
MODEL = {
    "vocab_size": 4224,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
WAYS: list[tuple[str, int, dict[str, str], list[str]]] = [
    ("1 process", 1, {}, []),
    ("2 DDP", 2, {}, []),
    ("2 FSDP2", 2, FSDP, []),
    ("2 FSDP2, reduction deferred", 2, FSDP, ["--training.defer_gradient_reduction=true"]),
]


def processor_seconds(ranks: Ranks) -> float:
    """Time that all processes have computed so far."""
    found = 0
    for process in ranks.processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        found += int(fields[11]) + int(fields[12])  # in user and in system mode
    return found / os.sysconf("SC_CLK_TCK")


def train(directory: Path, ranks: Ranks, count: int, words: list[str], steps: int) -> tuple[float, float]:
    """Median time of a step, and processor time of the run over all processes."""
    config = runs.write_run(
        directory,
        dropout=0.0,
        max_duration=steps,
        save_interval=None,
        save_interval_ephemeral=None,
        save_at_start=False,
        global_train_batch_size=BATCH,
        per_device_train_batch_size=BATCH // 4 // count,
    )
    settings = yaml.safe_load(config.read_text())
    settings["model"]["config"], settings["data"]["sequence_length"] = MODEL, LENGTH
    config.write_text(yaml.safe_dump(settings))
    np.random.default_rng(0).integers(0, 4000, LENGTH * 64, dtype=np.uint16).tofile(directory / "tokens.npy")
    before = processor_seconds(ranks)
    ranks.run(config, *words)
    computed = processor_seconds(ranks) - before
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if "train/CrossEntropyLoss" in row]
    return statistics.median(b - a for a, b in zip(times[WARM:], times[WARM + 1 :], strict=False)), computed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    steps = parser.parse_args().steps
    alone = alone_computed = 0.0
    print("| processes | seconds per step | half of one | overhead | processor seconds per step | overhead |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, count, env, words) in enumerate(WAYS):
            ranks = Ranks(count, **env)
            train(Path(directory) / f"{number}-first", ranks, count, words, WARM + 2)  # what happens only once
            _, short = train(Path(directory) / f"{number}-short", ranks, count, words, WARM + 2)
            seconds, long = train(Path(directory) / f"{number}-long", ranks, count, words, steps)
            ranks.close()
            computed = (long - short) / (steps - WARM - 2)
            if count == 1:
                alone, alone_computed = seconds, computed
            ideal = alone / count
            cells = [f"{seconds:.2f}", f"{ideal:.2f}", f"{seconds / ideal - 1:+.0%}"]
            cells += [f"{computed:.2f}", f"{computed / alone_computed - 1:+.0%}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
