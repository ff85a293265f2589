"""What a training step of ours asks for, in calls instead of seconds, beside a bare loop with transformers' Olmo2.

python benchmarks/step_counts.py [--json] [--names]

`train_hf.py` with default callbacks and every step logged, in four sizes: one and two layers, one and two
micro-batches. From these follow what a layer, a micro-batch and a step cost by themselves, exactly, also on a busy
machine. `tests/invariants/test_step_cost.py` holds limits for the figures; a step that asks for more fails there.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, astuple, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "rivals")]

import bare  # noqa: E402
from ours import configuration  # noqa: E402
from workloads import WORKLOADS, Workload, write_tokens  # noqa: E402

from benchmarks.measuring.counting import (  # noqa: E402
    PARTS,
    SIZES,
    STEPS,
    StepCounts,
    StepObserver,
    count_steps,
    count_training,
    take_apart,
)

SMALLEST = WORKLOADS["none"]


def work_of(layers: int, parts: int) -> Workload:
    return replace(SMALLEST, num_layers=layers, global_batch=parts * SMALLEST.micro_batch)


def count_ours(work: Workload, folder: Path) -> StepObserver:
    """`train_hf.py`, from a YAML file."""
    path = folder / "run.yaml"
    path.write_text(json.dumps(configuration(work, str(folder), STEPS)))
    return count_training([str(path)])


def count_bare(work: Workload, folder: Path) -> StepObserver:
    """The bare loop."""
    model = bare.stock_model(work)
    optimizer, rows = bare.fused_adamw(model), bare.token_rows(folder / "tokens.npy", work)
    return count_steps(lambda step: bare.training_step(model, optimizer, rows, work, step))


LOOPS: dict[str, Callable[[Workload, Path], StepObserver]] = {"ours": count_ours, "bare": count_bare}


def measure(names: bool = False) -> dict[str, dict[str, StepCounts]]:
    """Counts of `PARTS`, and of the largest size as `whole`, for each loop."""
    result = {}
    for loop, count in LOOPS.items():
        found = {}
        for size in SIZES:
            work = work_of(*size)
            with tempfile.TemporaryDirectory() as directory:
                write_tokens(work, Path(directory) / "tokens.npy", steps=STEPS)
                observer = count(work, Path(directory))
            found[size] = observer.counts()
        if names:
            by_number = sorted(observer.operations.by_name.items(), key=lambda entry: -entry[1])
            sys.stderr.write(f"{loop}: " + ", ".join(f"{name} {number}" for name, number in by_number) + "\n")
        result[loop] = take_apart(found) | {"whole": found[SIZES[-1]]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--names", action="store_true", help="also which operators were called how often")
    options = parser.parse_args()
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    result = measure(options.names)
    if options.json:
        plain = {loop: {part: asdict(counts) for part, counts in parts.items()} for loop, parts in result.items()}
        sys.stdout.write("\nRESULT " + json.dumps(plain) + "\n")
        return
    columns = [field.name for field in fields(StepCounts)]
    print("| once per | loop | " + " | ".join(columns).replace("_", " ") + " |")
    print("|---|---|" + "---|" * len(columns))
    for part in (*PARTS, "whole"):
        for loop in LOOPS:
            print(f"| {part} | {loop} | " + " | ".join(f"{value:,}" for value in astuple(result[loop][part])) + " |")
    print(f"\nThe whole: {SIZES[-1][0]} layers, {SIZES[-1][1]} micro-batches.")


if __name__ == "__main__":
    main()
