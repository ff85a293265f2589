"""Two nodes of two processes train one run; one node is killed in the middle, and the job goes on by itself.

python benchmarks/kill_a_node.py [--node 1] [--steps 60]

The nodes are separate launches of launch/node.sh over loopback. Printed: what happened when, by the nodes' own logs,
and whether the final weights and every logged number are those of an undisturbed run, bit for bit.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import runs  # noqa: E402
from tests.nodes import train  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", type=int, choices=(0, 1), default=1, help="which one is killed")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        undisturbed, _ = train(Path(directory) / "undisturbed", steps=given.steps, kill=None)
        killed, told = train(Path(directory) / "killed", steps=given.steps, kill=given.node)
        print("\n".join(told))
        for node in (0, 1):
            lines = (killed.parent / f"node{node}.txt").read_text(errors="replace").splitlines()
            print("\n".join(line for line in lines if line.startswith("[node") or "because rank" in line))
        runs.same_run(killed, undisturbed, range(1, given.steps + 1))
        print(f"all {given.steps} steps and the final weights are those of the undisturbed run, bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
