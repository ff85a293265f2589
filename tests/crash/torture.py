"""Kills real runs at random instants, over and over, and compares what they become with a run never killed.

python -m tests.crash.torture [--mode ddp] [--instants 40] [--report torture.md]

An instant is a random time after the launch, drawn over the length of a whole launch: it falls into start-up, restart,
training, saving and the end. With several ranks one of them is killed, or all at once. Every run is started again
until it ends; then each logged loss, gradient norm and learning rate and the final weights must be those of the
undisturbed run, to the last bit.
"""

import argparse
import itertools
import platform
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from olmo_hf.training import commit
from tests import runs
from tests.crash.conftest import MODES
from tests.forks import Forks, Launch

STEPS = 40
SETTINGS = {"max_duration": STEPS, "save_interval": 10, "save_interval_ephemeral": 2, "keep_sharded": 2}


@dataclass
class Figures:
    """What a mode came to."""

    mode: str
    instants: int = 0
    """Kills."""

    in_save: int = 0
    """Kills that left a half-written checkpoint behind."""

    restarts: int = 0
    """Launches that took up a run that had been killed."""

    runs: int = 0
    mismatches: int = 0
    """Runs whose losses or weights were not those of the undisturbed run."""

    seconds: float = 0.0

    def row(self) -> str:
        """A line of the table."""
        return (
            f"| {self.mode} | {self.instants} | {self.in_save} | {self.restarts} | {self.runs} | {self.mismatches} | "
            f"{self.seconds:.0f} |"
        )


HEADER = "| mode | kills | inside a save | restarts | runs | mismatches | seconds |\n|---|---|---|---|---|---|---|"


def torture(mode: str, *, instants: int, directory: Path, forks: Forks, seed: int = 0) -> Figures:
    """Kill runs of a mode at `instants` random instants.

    Args:
        mode: one of `MODES`.
        instants: number of kills.
        directory: a scratch directory.
        forks: starts the launches.
        seed: of the instants.
    """
    way, draw, figures = MODES[mode], random.Random(seed), Figures(mode)
    start = time.perf_counter()
    reference = runs.write_run(directory / "reference", **{**SETTINGS, **way.training})
    forks.run(reference, ranks=way.ranks, **way.env)
    begin = time.perf_counter()
    shutil.rmtree(directory / "reference" / "run")
    forks.run(reference, ranks=way.ranks, **way.env)
    launch_seconds = time.perf_counter() - begin
    while figures.instants < instants:
        config = runs.write_run(directory / f"run-{figures.runs}", **{**SETTINGS, **way.training})
        figures.runs += 1
        for launches in itertools.count():
            launch = forks.start(config, ranks=way.ranks, **way.env)
            figures.restarts += launches > 0
            killed = figures.instants < instants and _kill_at_random(launch, draw, launch_seconds)
            figures.instants += killed
            figures.in_save += killed and bool(list((config.parent / "run").glob(".staging-checkpoint-*")))
            if not killed:
                codes = launch.wait()
                assert not any(codes), (config.parent / "log.txt").read_text(errors="replace")[-4000:]
                break
        figures.mismatches += not _same(config.parent / "run", directory / "reference" / "run")
    figures.seconds = time.perf_counter() - start
    return figures


def _kill_at_random(launch: Launch, draw: random.Random, launch_seconds: float) -> bool:
    """Kill the launch, or one rank of it, unless it ends before."""
    deadline = time.monotonic() + draw.uniform(0.0, launch_seconds)
    while time.monotonic() < deadline:
        if not launch.running():
            return False
        time.sleep(0.001)
    if not launch.running():
        return False
    victim = draw.randrange(len(launch.pids) + 1)
    if victim < len(launch.pids):
        launch.signal(9, ranks=[victim])  # type: ignore[arg-type]
        time.sleep(draw.uniform(0.0, 0.2))
    launch.kill()
    return True


def _same(one: Path, other: Path) -> bool:
    for checkpoint in commit.list_checkpoints(one):
        commit.verify(checkpoint)
    return runs.losses(one) == runs.losses(other) and runs.weights(one) == runs.weights(other)


def main(words: list[str]) -> int:
    """Print the table, and write it where it was asked for; 1 when anything differed."""
    parser = argparse.ArgumentParser(prog="torture", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", choices=[*MODES, "all"], default="all")
    parser.add_argument("--instants", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="file for the table; it grows as modes are done")
    options = parser.parse_args(words)
    lines = [f"torch {torch.__version__}, {platform.platform()}, seed {options.seed}", "", *HEADER.splitlines()]
    print("\n".join(lines), flush=True)
    mismatches = 0
    with tempfile.TemporaryDirectory() as scratch:
        forks = Forks(Path(scratch))
        for mode in MODES if options.mode == "all" else [options.mode]:
            directory = Path(scratch) / mode
            figures = torture(mode, instants=options.instants, directory=directory, forks=forks, seed=options.seed)
            mismatches += figures.mismatches
            lines.append(figures.row())
            print(lines[-1], flush=True)
            if options.report is not None:
                options.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
        forks.close()
    return int(mismatches > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
