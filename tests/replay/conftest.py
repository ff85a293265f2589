"""A run that was killed in its middle and went on, to be replayed."""

from pathlib import Path

import pytest

from tests import runs
from tests.forks import Forks


@pytest.fixture(scope="session")
def restarted(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a run of 12 steps, killed after step 8 and taken up again from the checkpoint of step 8."""
    directory = tmp_path_factory.mktemp("restarted")
    config = runs.write_run(directory, save_interval=4, save_interval_ephemeral=None, max_duration=12)
    launch = forks.start(config, "--training.stop_at=12")
    launch.until(lambda: 9 in runs.logged_steps(directory / "run"))
    launch.kill()
    forks.run(config)
    return directory / "run"
