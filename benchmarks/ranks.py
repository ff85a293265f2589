"""The same run on 1, 2 and 4 processes, with DDP, FSDP2 and HSDP: how far the losses are apart.

python benchmarks/ranks.py [--steps 30] [--learning-rate 1e-3]

Each instance trains on another number of tokens, some on none, and clipping is always at work. Shown is the largest
relative difference of any step's loss from the run of one process; the instances of every step must be the same. What
differs is the order of sums: the last bits of float32, which AdamW magnifies where its moments are near 0, the more
the larger the steps are.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import ways  # noqa: E402

TARGET = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    given = parser.parse_args()
    steps = given.steps
    worst, same = 0.0, True
    print("| clipping | processes | loss | gradient norm | same instances |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for number, (clipping, settings) in enumerate(ways.CLIPPINGS.items()):
            first: Path | None = None
            for way in ways.WAYS:
                where = Path(directory) / f"{number}-{way}".replace(" ", "-")
                run = {"max_duration": steps, "save_interval_ephemeral": None, "learning_rate": given.learning_rate}
                found = ways.run(way, where, **run, **settings)
                first = found if first is None else first
                loss, norm = ways.largest_differences(first, found)
                alike = ways.instances(first) == ways.instances(found)
                worst, same = max(worst, loss), same and alike
                print(f"| {clipping} | {way} | {loss:.1e} | {norm:.1e} | {'yes' if alike else 'NO'} |", flush=True)
    print(f"largest relative difference of a loss over {steps} steps: {worst:.1e}, target {TARGET:.0e}")
    return 0 if worst <= TARGET and same else 1


if __name__ == "__main__":
    sys.exit(main())
