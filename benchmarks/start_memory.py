"""How much memory each rank needs to start and to restart a run whose model is spread over the ranks (FSDP2).

python benchmarks/start_memory.py [--width 1024] [--ranks 2 4]

No rank may ever hold the whole model. At the start, target: weights / ranks + one block + a constant; at a restart the
two moments of AdamW come on top: 3 x weights / ranks + one block + a constant. A block is the largest thing that is
handled at once: a layer, or the embedding. The constant is what the same needs for a model without size, plus 48 MB
for what the allocator keeps.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from olmo_hf.model.configuration_olmo import OlmoHfConfig  # noqa: E402
from olmo_hf.model.size import count_parameters  # noqa: E402
from tests.measured_start import ALLOWANCE_BYTES, fields, measure  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--starts-only", action="store_true", help="leave restarts out")
    given = parser.parse_args()
    model = fields(given.width, given.layers, given.vocabulary)
    config = OlmoHfConfig(**model)
    count = count_parameters(config)
    weights, block = 4 * count.total, 4 * max(count.per_layer, count.embedding)
    missed = False
    print(f"{count.total:,} parameters: {weights / 1e6:,.0f} MB in float32, one block {block / 1e6:,.0f} MB")
    print("| ranks | what | peak per rank | allowed | whole state |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for ranks in given.ranks:
            for restart in (False,) if given.starts_only else (False, True):
                what, held = ("restart", 3 * weights) if restart else ("start", weights)
                where = Path(directory) / f"{what}{ranks}"
                constant = measure(where / "empty", fields(64, 1, 128), ranks, restart=restart) + ALLOWANCE_BYTES
                found = measure(where / "full", model, ranks, restart=restart)
                allowed = held // ranks + block + constant
                missed |= found > allowed
                cells = [f"{size / 1e6:,.0f} MB" for size in (found, allowed, held)]
                print(f"| {ranks} | {what} | {' | '.join(cells)} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
