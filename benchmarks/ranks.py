"""The same run on 1, 2 and 4 processes, with DDP, FSDP2 and HSDP: how far the losses are apart.

python benchmarks/ranks.py [--steps 30] [--learning-rate 1e-3] [--nudges 3]

Each instance trains on another number of tokens, some on none, and clipping is always at work. Shown is the largest
relative difference of any step's loss from the run of one process; the instances of every step must be the same. What
differs is the order of sums: the last bits of float32, which AdamW magnifies where its moments are near 0, the more
the larger the steps are. `--nudges` shows how much: runs of one process, like the first in everything but the last bit
of their initial weights.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import ways  # noqa: E402

TARGET = 1e-5


def compare(name: str, first: Path, found: Path, clipping: str) -> tuple[float, bool]:
    """Prints a row; returns the largest relative difference of a loss, and whether the instances are the same."""
    loss, norm = ways.largest_differences(first, found)
    alike = ways.instances(first) == ways.instances(found)
    print(f"| {clipping} | {name} | {loss:.1e} | {norm:.1e} | {'yes' if alike else 'NO'} |", flush=True)
    return loss, alike


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--ways", nargs="+", choices=ways.WAYS, default=list(ways.WAYS))
    parser.add_argument("--nudges", type=int, default=0, help="runs of one process from weights with other last bits")
    given = parser.parse_args()
    run = {"max_duration": given.steps, "save_interval_ephemeral": None, "learning_rate": given.learning_rate}
    worst, same = 0.0, True
    print("| clipping | processes | loss | gradient norm | same instances |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for number, (clipping, settings) in enumerate(ways.CLIPPINGS.items()):
            where = Path(directory) / str(number)
            first = ways.run("1 process", where / "first", **run, **settings)
            for way in [way for way in given.ways if way != "1 process"]:
                found = ways.run(way, where / way.replace(" ", "-"), **run, **settings)
                loss, alike = compare(way, first, found, clipping)
                worst, same = max(worst, loss), same and alike
            for seed in range(given.nudges):
                weights = ways.nudged_weights(first, where / f"weights{seed}", seed=seed)
                found = ways.run("1 process", where / f"nudged{seed}", init_from=weights, **run, **settings)
                compare("1 process, other last bits", first, found, clipping)
    print(f"largest relative difference of a loss over {given.steps} steps: {worst:.1e}, target {TARGET:.0e}")
    return 0 if worst <= TARGET and same else 1


if __name__ == "__main__":
    sys.exit(main())
