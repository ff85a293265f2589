"""The change of the weights in one step, cut in twelve ways: micro-batches, processes, DDP or FSDP2.

python benchmarks/invariance.py

One step of plain gradient descent at rate 1 on instances with unequal numbers of labels, some with none; the change of
the weights is then the gradient. The table shows the largest difference of any weight from the first cell.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from safetensors.torch import load_file  # noqa: E402

from tests.invariants.test_split import FSDP, PLAIN_DESCENT, settings  # noqa: E402
from tests.served import Ranks  # noqa: E402

BATCH = 16
"""Instances of the step."""

MICRO_BATCHES = (1, 2, 4, 8)
"""How many of them one rank accumulates."""

TARGET = 1e-6


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ways = {"1 process": Ranks(1), "2 ranks DDP": Ranks(2), "2 ranks FSDP2": Ranks(2, **FSDP)}
    first, worst = None, 0.0
    print(f"| micro-batches of a rank | {' | '.join(ways)} |\n|---|{'---|' * len(ways)}")
    with tempfile.TemporaryDirectory() as directory:
        for count in MICRO_BATCHES:
            cells = []
            for way, ranks in ways.items():
                size = BATCH // count // len(ranks.processes)
                where = Path(directory) / f"{count}-{way}".replace(" ", "-")
                ranks.run(settings(where, size, global_train_batch_size=BATCH, **PLAIN_DESCENT))
                found = load_file(where / "run" / "latest" / "model.safetensors")
                first = found if first is None else first
                difference = max((found[name] - first[name]).abs().max().item() for name in first)
                worst = max(worst, difference)
                cells.append(f"{difference:.1e}")
            print(f"| {count} | {' | '.join(cells)} |", flush=True)
    for ranks in ways.values():
        ranks.close()
    moved = max((first[name]).abs().max().item() for name in first) if first is not None else 0.0
    print(f"largest difference {worst:.1e}, target {TARGET:.0e}; largest weight {moved:.2f}")
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
