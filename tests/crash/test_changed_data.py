"""A token file that is changed while a run reads it."""

import os
import time
from pathlib import Path

import pytest
import yaml

from tests import runs
from tests.forks import Forks

FAR = 100_000
"""Steps that no test waits for."""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_cut_off_ends_the_run_at_once_with_its_name(forks: Forks, tmp_path: Path, workers: int) -> None:
    config = runs.write_run(tmp_path, max_duration=FAR, save_interval=None, save_interval_ephemeral=None)
    settings = yaml.safe_load(config.read_text())
    settings["data"]["num_workers"] = workers
    config.write_text(yaml.safe_dump(settings))
    launch = forks.start(config)
    launch.until(lambda: bool(runs.logged_steps(tmp_path / "run")))
    os.truncate(tmp_path / "tokens.npy", 400)
    began = time.monotonic()
    assert launch.wait(timeout_seconds=100) == [2]
    # Workers that wait for nobody would hold it up for a minute.
    assert time.monotonic() - began < 40
    said = (tmp_path / "log.txt").read_text()
    last = said[said.index("\nerror: ") :].strip().splitlines()
    assert len(last) == 2
    assert last[0].startswith(f"error: {tmp_path}/tokens.npy: ends ")
    assert last[0].endswith("it was changed while in use. Restore it and start again")
    assert last[1] == "(set OLMO_HF_DEBUG=1 to see where it was raised)"
    assert "Traceback" not in said
