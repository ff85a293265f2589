"""Runs of five steps with features drawn at random: killed at a random moment, they end as undisturbed ones."""

import random
import shutil
import time
from pathlib import Path

import pytest

from tests import features, runs
from tests.forks import Forks

STEPS = 5
CONFIGURATIONS, BY_DEFAULT = 30, 3

# Left out: what makes a launch that goes on another run on purpose, and what is told by the clock.
ANOTHER_RUN = {"an epoch", "length in tokens", "stops early", "so many steps", "logged by tokens", "no indices"}
SLOW = {"compiled"}


def losses_where_logged(run_dir: Path) -> dict[int, tuple[float, float, float]]:
    found = runs.losses(run_dir)
    assert sorted(found) == list(range(1, STEPS + 1))
    return found


def train(forks: Forks, here: Path, directory: Path, names: list[str], *, kill_after: float | None = None) -> float:
    """Train with these features, perhaps with a kill on the way; returns the seconds it took."""
    directory.mkdir()
    target = features.write(here / "run.yaml", here, names, directory / "run.yaml", output_dir=f"{directory}/run")
    for name in ("store", "record"):  # copies of another run must not be found
        shutil.rmtree(here / name, ignore_errors=True)
    began = time.monotonic()
    if kill_after is not None:
        launch = forks.start(target)
        deadline = began + kill_after
        while time.monotonic() < deadline and launch.running():
            time.sleep(0.005)
        launch.kill()
    forks.run(target)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random")
    features.prepare(directory)
    return directory


@pytest.mark.parametrize(
    "seed",
    [pytest.param(n, marks=[pytest.mark.slow] if n >= BY_DEFAULT else []) for n in range(CONFIGURATIONS)],
)
def test_killed_at_a_random_moment(forks: Forks, here: Path, tmp_path: Path, seed: int) -> None:
    names = features.drawn(seed, without=ANOTHER_RUN | SLOW)
    seconds = train(forks, here, tmp_path / "whole", names)
    train(forks, here, tmp_path / "killed", names, kill_after=random.Random(seed).uniform(0, seconds))
    whole, killed = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    assert losses_where_logged(killed) == losses_where_logged(whole), names
    assert runs.weights(killed) == runs.weights(whole), names
