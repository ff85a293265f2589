"""Writes the table of trajectories in docs/parity.md: the original's recorded runs, trained again by `train_hf.py`.

python docs/parity_trajectories.py [RUN ...]

With names of runs it only prints their rows.
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("ACCELERATE_USE_CPU", "true")

from tests.golden.trajectories import RUNS, Pair, run_again  # noqa: E402

PAGE = ROOT / "docs" / "parity.md"
START, END = "<!-- trajectories: written by docs/parity_trajectories.py -->", "<!-- end of trajectories -->"
HEAD = """| run | steps | CE | z-loss | gradient norm | learning rate | instances | final weights |
|---|---|---|---|---|---|---|---|"""


def row(pair: Pair) -> str:
    """One run: largest differences over all steps, with the tolerance behind the slash."""
    ours, theirs, tolerances = pair.ours, pair.theirs, pair.tolerances
    steps = theirs["step"]
    assert ours["step"].tolist() == steps.tolist(), pair.name
    ce = np.abs(ours["train/CrossEntropyLoss"] - theirs["loss_ce"]).max()
    norm = np.abs(ours["optim/total_grad_norm"] / theirs["grad_norm"] - 1).max()
    rate = np.abs(ours["optim/learning_rate_group0"] - theirs["lr"]).max()
    z = f"{np.abs(ours['train/ZLoss'] - theirs['loss_z']).max():.0e}" if "train/ZLoss" in ours else "off"
    return (
        f"| {pair.name} | {int(steps[0])}-{int(steps[-1])} | {ce:.0e} / {tolerances['ce']:.0e} | {z} "
        f"| {norm:.0e} / {tolerances['norm']:.0e} | {'equal' if rate == 0 else f'{rate:.0e}'} "
        f"| {'equal' if pair.instances_are_equal() else 'DIFFERENT'} "
        f"| {pair.weight_difference():.0e} / {tolerances['weight']:.0e}{'' if pair.has_weights else ' *'} |"
    )


def measured(name: str) -> str:
    """Train one run again, in a directory that is thrown away."""
    with tempfile.TemporaryDirectory() as directory:
        found = row(run_again(name, Path(directory)))
    print(found, flush=True)
    return found


if __name__ == "__main__":
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            measured(name)
        sys.exit()
    rows = "\n".join([HEAD, *(measured(name) for name in RUNS)])
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{START}\n{rows}\n{END}{after}", encoding="utf-8")
