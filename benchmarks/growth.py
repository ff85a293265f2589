"""How the cost of a step grows with the length of sequences, the number of layers and the number of ranks.

python benchmarks/growth.py [--only sequence layers ranks] [--steps 5]

Sequence and layers: processor time per token of `train_hf.py`, one thread, median of the steady steps. Predicted from
the smallest size: everything but attention grows as the operations of the matrix products per token do, attention as
its kernel does when it runs alone. Ranks (DDP, the same work for each): what a rank asks torch and Python to do, and
the bytes that takes, counted exactly (`benchmarks/step_counts.py`), against one process; its processor time is shown
beside. Target: within 10 % of what is predicted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "rivals")]

from workloads import Workload, write_tokens  # noqa: E402

from benchmarks.measuring.surroundings import surroundings  # noqa: E402

BASE = Workload(
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    intermediate_size=1024,
    sequence_length=512,
    vocab_size=8192,
    global_batch=8,
    micro_batch=8,
)
LENGTHS = [512, 1024, 2048, 4096]
LAYERS = [2, 4, 8, 16]
RANKS = [1, 2, 4]
PER_RANK = replace(BASE, sequence_length=256, global_batch=4, micro_batch=1)
"""The work of one rank: four micro-batches."""
ALLOWED = 0.10


def of_length(length: int) -> Workload:
    """The same number of tokens in longer sequences."""
    rows = BASE.global_batch * BASE.sequence_length // length
    return replace(BASE, sequence_length=length, global_batch=rows, micro_batch=rows)


def of_layers(layers: int) -> Workload:
    return replace(BASE, num_layers=layers, global_batch=4, micro_batch=4)


def product_operations(work: Workload) -> int:
    """Floating-point operations per token in the matrix products, without attention; forward and backward."""
    layer = 4 * work.hidden_size**2 + 3 * work.hidden_size * work.intermediate_size
    return 6 * (work.num_layers * layer + work.hidden_size * work.vocab_size)


def attention_seconds(work: Workload, repeats: int = 3) -> float:
    """Of the kernel alone, forward and backward, per token: all layers."""
    import torch

    torch.set_num_threads(1)
    shape = (work.micro_batch, work.num_heads, work.sequence_length, work.hidden_size // work.num_heads)
    heads = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    gradient, found = torch.ones(shape), []
    for _ in range(repeats + 1):
        began = time.process_time()
        torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).backward(gradient)
        found.append(time.process_time() - began)
    tokens = work.micro_batch * work.sequence_length
    return work.num_layers * statistics.median(found[1:]) / tokens


def measure_here(request: dict[str, Any]) -> None:
    """One rank of a run, in this process; prints what was found."""
    from ours import configuration

    from benchmarks.measuring.counting import STEPS, StepObserver, observe_training

    work, folder = Workload(**request["work"]), request["folder"]
    observer, marks = StepObserver(), []
    steps = request["steps"] if request["steps"] is not None else STEPS

    def step_ended(step: int) -> None:
        marks.append(time.process_time())
        if request["steps"] is None:
            observer.step_ended(step)

    path = Path(folder) / f"run{os.environ.get('RANK', '0')}.yaml"
    path.write_text(json.dumps(configuration(work, folder, steps)))
    observe_training([str(path)], step_ended)
    seconds = [after - before for before, after in pairwise(marks[1:])]
    counts = asdict(observer.counts()) if request["steps"] is None else {}
    sys.stdout.write("\nRESULT " + json.dumps({"seconds": statistics.median(seconds), **counts}) + "\n")


def measure(work: Workload, steps: int | None, ranks: int = 1) -> list[dict[str, float]]:
    """What each rank found: processor seconds per step; counts too where no number of steps is given."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(work, Path(folder) / "tokens.npy", steps=(steps or 10) * ranks + 1)
        request = json.dumps({"work": asdict(work), "folder": folder, "steps": steps})
        words = [__file__, "--one", request]
        if ranks > 1:
            words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    found = [json.loads(line.partition("RESULT ")[2]) for line in done.stdout.splitlines() if "RESULT {" in line]
    if done.returncode != 0 or len(found) != ranks:
        raise SystemExit(f"{ranks} ranks, {work}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return found


def growth(name: str, sizes: Sequence[int], works: Sequence[Workload], steps: int) -> bool:
    """One table of processor time per token; whether all is as predicted."""
    print(f"\n## {name}\n\n| {name} | µs per token | attention alone | predicted | off by |\n|---|---|---|---|---|")
    kept, within = None, True
    for size, work in zip(sizes, works, strict=True):
        attention = attention_seconds(work)
        found = measure(work, steps)[0]["seconds"] / work.tokens_per_step
        kept = kept if kept is not None else (found - attention) / product_operations(work)
        predicted = kept * product_operations(work) + attention
        off = found / predicted - 1
        within &= abs(off) <= ALLOWED
        cells = [f"{seconds * 1e6:.1f}" for seconds in (found, attention, predicted)]
        print(f"| {size:,} | {' | '.join(cells)} | {off:+.1%} |", flush=True)
    return within


def growth_of_ranks() -> bool:
    """One table of counts per rank; whether none asks for more than 10 % above one process."""
    kinds = ("operations", "bytes_touched", "python_calls", "seconds")
    head = "operations | bytes touched | Python calls | processor s per step"
    print(f"\n## ranks\n\n| ranks | {head} |\n|---|---|---|---|---|")
    alone: dict[str, float] = {}
    within = True
    for ranks in RANKS:
        found = measure(replace(PER_RANK, global_batch=ranks * PER_RANK.global_batch), None, ranks)
        mean = {kind: statistics.mean(one[kind] for one in found) for kind in kinds}
        alone = alone or mean
        cells = []
        for kind in kinds:
            rise = mean[kind] / alone[kind] - 1
            within &= rise <= ALLOWED or kind == "seconds"
            shown = f"{mean[kind]:.3f}" if kind == "seconds" else f"{mean[kind]:,.0f}"
            cells.append(f"{shown} ({rise:+.1%})")
        print(f"| {ranks} | {' | '.join(cells)} |", flush=True)
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["sequence", "layers", "ranks"])
    parser.add_argument("--steps", type=int, default=5, help="of each run; the first is left out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        measure_here(json.loads(options.one))
        return 0
    print("\n".join(["# Growth of cost", "", *surroundings(), f"- the smallest size: {BASE}"]), flush=True)
    chosen = options.only or ["sequence", "layers", "ranks"]
    within = True
    if "sequence" in chosen:
        within &= growth("sequence length", LENGTHS, [of_length(length) for length in LENGTHS], options.steps)
    if "layers" in chosen:
        within &= growth("layers", LAYERS, [of_layers(layers) for layers in LAYERS], options.steps)
    if "ranks" in chosen:
        within &= growth_of_ranks()
    print(f"\n{'all' if within else 'NOT all'} within {ALLOWED:.0%} of what is predicted")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
