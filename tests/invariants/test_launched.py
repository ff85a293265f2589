"""The launch line of the README: two processes through `accelerate launch` give the numbers of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs


def launch(config: Path, accelerate_config: str) -> None:
    """As a user types it: nothing in the environment says that this is a CPU."""
    settings = runs.ROOT / "accelerate_configs" / accelerate_config
    program = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", str(settings)]
    environment = {k: v for k, v in runs.environment().items() if not k.startswith("ACCELERATE")}
    done = subprocess.run(
        [*program, "train_hf.py", str(config)], cwd=runs.ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(os.cpu_count() == 1, reason="two processes want two cores")
def test_two_launched_processes_give_the_losses_of_one(tmp_path):
    found = {}
    for name in ("cpu.yaml", "cpu_ddp.yaml"):
        config = runs.write_run(tmp_path / name, dropout=0.0, max_duration=3, save_interval_ephemeral=None)
        launch(config, name)
        found[name] = runs.losses(tmp_path / name / "run")
    one, two = found["cpu.yaml"], found["cpu_ddp.yaml"]
    assert list(one) == list(two) == [1, 2, 3]
    for step in one:
        assert two[step] == pytest.approx(one[step], rel=1e-5)
