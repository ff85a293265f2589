"""What the tests of crashes share: launches that start at once, and runs that were never disturbed."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import runs
from tests.forks import Forks
from tests.invariants.test_split import FSDP


@dataclass(frozen=True)
class Mode:
    """How a run is spread and saved."""

    ranks: int = 1
    training: dict[str, object] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


MODES = {
    "one": Mode(),
    "ddp": Mode(ranks=2),
    "fsdp2": Mode(ranks=2, env=FSDP),
    "async": Mode(training={"checkpoint_async": True}),
    "fsdp2-async": Mode(ranks=2, training={"checkpoint_async": True}, env=FSDP),
}


class Undisturbed:
    """Run directories of runs that were never disturbed, one for each way to spread a run."""

    def __init__(self, forks: Forks, directory: Path):
        self._forks = forks
        self._directory = directory

    def __getitem__(self, name: str) -> Path:
        mode = MODES[name]
        directory = self._directory / f"{mode.ranks}-{len(mode.env)}"  # saving in the background changes nothing
        if not directory.exists():
            self._forks.run(runs.write_run(directory), ranks=mode.ranks, **mode.env)
        return directory / "run"


@pytest.fixture(scope="session")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """See `Undisturbed`."""
    return Undisturbed(forks, tmp_path_factory.mktemp("undisturbed"))
