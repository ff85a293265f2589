"""What real runs recorded, after kills and on another number of ranks, against the order of their configuration."""

import argparse
from pathlib import Path

import pytest
import yaml

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices, times_read
from olmo_hf.cli import inspect_data
from olmo_hf.data.inspection import ids_of_rank, ids_of_step
from tests import runs
from tests.forks import Forks

STEPS = 30
"""Enough that a run that is to be killed at step 5 does not end before."""


def test_killed_on_two_ranks_and_continued_on_one(
    forks: Forks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.write_run(tmp_path, max_duration=STEPS, save_interval=STEPS, save_interval_ephemeral=3)
    settings = yaml.safe_load(config.read_text())
    settings["callbacks"]["data_indices"] = {"flush_steps": 1}
    config.write_text(yaml.safe_dump(settings))
    run_dir = tmp_path / "run"
    launch = forks.start(config, ranks=2)
    launch.until(lambda: len(runs.logged_steps(run_dir)) >= 5)
    launch.kill()
    before = read_data_indices(data_indices_path(run_dir, 1))
    forks.run(config)

    _, order = inspect_data.open_run_data(config, [], 1)
    recorded = [read_data_indices(data_indices_path(run_dir, rank)) for rank in range(2)]
    assert sorted(recorded[0]) == list(range(1, STEPS + 1))
    alone = [step for step, ids in recorded[0].items() if len(ids) == order.global_batch_size]
    shared = [step for step in recorded[0] if step not in alone]
    assert alone == list(range(min(alone), STEPS + 1))
    assert shared == list(range(1, min(alone)))
    for step, ids in recorded[0].items():
        whole = ids_of_step(order, step)
        assert ids == ids_of_rank(whole, 0, 2 if step in shared else 1).tolist()
        if step in shared:
            assert recorded[1][step] == ids_of_rank(whole, 1, 2).tolist()
    # Nothing that was recorded before the kill is gone, and what was repeated is known.
    assert {step: recorded[1][step] for step in before} == before
    again = [step for step, times in times_read(data_indices_path(run_dir, 0)).items() if times > 1]
    assert set(again) >= {step for step in before if step in alone} - {max(before)}

    parser = argparse.ArgumentParser()
    inspect_data.add_arguments(parser)
    assert inspect_data.run(parser.parse_args([str(run_dir), "--recorded"])) == 0
    said = capsys.readouterr().out
    assert f"{STEPS} steps of 2 ranks were recorded" in said
    assert "all agree with the order" in said
    assert ("were repeated after a restart" in said) == bool(again)
