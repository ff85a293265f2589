"""Forty random instants in every mode; a few in the default run."""

from pathlib import Path

import pytest

from tests.crash.conftest import MODES
from tests.crash.torture import HEADER, torture
from tests.forks import Forks


def check(mode: str, instants: int, forks: Forks, directory: Path) -> None:
    figures = torture(mode, instants=instants, directory=directory, forks=forks, seed=len(mode))
    print(f"\n{HEADER}\n{figures.row()}")
    assert figures.mismatches == 0
    assert figures.instants == instants
    assert figures.restarts == instants, "every kill was followed by a launch, and every run came to its end"


@pytest.mark.parametrize("mode", ["one"])
def test_a_few_instants(mode: str, forks: Forks, tmp_path: Path) -> None:
    check(mode, 3, forks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_forty_instants(mode: str, forks: Forks, tmp_path: Path) -> None:
    check(mode, 40, forks, tmp_path)
