"""Going back before a loss spike: exactly as a restart that leaves the batches out, whatever is killed meanwhile."""

from pathlib import Path

import pytest

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices, read_returns
from olmo_hf.callbacks.json_lines import EVENTS_FILE, read_json_lines
from olmo_hf.cli.inspect_data import open_run_data
from olmo_hf.cli.main import main
from olmo_hf.data.inspection import ids_of_step
from olmo_hf.data.order import DataPosition
from tests import runs
from tests.forks import Forks
from tests.invariants.test_split import FSDP
from tests.poisoned import write_poisoned_run

POISON = (7, 11)
"""Batch 7 is step 7; after going back to step 4, batch 11 is step 8, since batches 5 to 7 are passed over."""


def events(run_dir: Path, name: str) -> list[dict]:
    return [event for event in read_json_lines(run_dir / EVENTS_FILE) if event["event"] == name]


@pytest.fixture(scope="session")
def went_back(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one rank that went back twice, never disturbed."""
    config = write_poisoned_run(tmp_path_factory.mktemp("back"), POISON, max_rollbacks=3)
    forks.run(config)
    return config.parent / "run"


def test_what_is_on_record(went_back: Path) -> None:
    assert [event["step"] for event in events(went_back, "loss_spike")] == [7, 8]
    found = [(one["from_step"], one["step"], one["passed_over_batches"]) for one in events(went_back, "rollback")]
    assert found == [(7, 4, 3), (8, 4, 4)]
    assert [one["count"] for one in events(went_back, "rollback")] == [1, 2]
    assert read_returns(went_back) == [(4, DataPosition(0, 8 * 11))], "the first no longer holds"
    assert [event["step"] for event in events(went_back, "checkpoint")] == [4, 8, 12]
    assert runs.logged_steps(went_back) == [*range(1, 8), *range(5, 9), *range(5, 13)]


def test_the_batches_are_passed_over_and_nothing_else(went_back: Path) -> None:
    _, order = open_run_data(went_back, [], 1)
    recorded = read_data_indices(data_indices_path(went_back, 0))
    for step in range(1, 13):
        batch = step if step <= 4 else step + 7  # batches 5 to 11 were read and passed over
        assert recorded[step] == ids_of_step(order, batch).tolist(), step
    assert main(["inspect-data", str(went_back), "--recorded"]) == 0
    assert main(["inspect-data", str(went_back), "--step", "9", "--recorded", "--ids-only"]) == 0


def test_it_is_a_restart_that_skips(went_back: Path, forks: Forks, tmp_path: Path) -> None:
    """The same steps by the means that exist for this: a path in `resume` and `fast_forward_batches`."""
    config = write_poisoned_run(tmp_path / "other", POISON)
    forks.run(
        config,
        f"--training.resume={went_back / 'checkpoint-4'}",
        "--training.fast_forward_batches=7",
        "--name=other",
    )
    runs.same_run(went_back, tmp_path / "other" / "run", range(5, 13))


@pytest.mark.parametrize(
    "moment", [(5, 2), (8, 1), (5, 3), (7, 3), (10, 1)], ids=["first-step", "second-spike", "again", "later", "saved"]
)
def test_killed_in_the_middle_of_it(went_back: Path, forks: Forks, tmp_path: Path, moment: tuple[int, int]) -> None:
    """Killed when a step is logged for the n-th time: before and after the second going back, and after a save."""
    step, times = moment
    config = write_poisoned_run(tmp_path, POISON, max_rollbacks=3)
    launch = forks.start(config)
    launch.until(lambda: runs.logged_steps(tmp_path / "run").count(step) >= times)
    launch.kill()
    forks.run(config)
    runs.same_run(tmp_path / "run", went_back)
    assert read_returns(tmp_path / "run") == read_returns(went_back)
    assert events(tmp_path / "run", "rollback")[-1]["count"] == 2
    recorded = [read_data_indices(data_indices_path(one, 0)) for one in (tmp_path / "run", went_back)]
    assert recorded[0] == recorded[1]


def test_not_more_often_than_allowed(forks: Forks, tmp_path: Path) -> None:
    config = write_poisoned_run(tmp_path, POISON, max_rollbacks=1)
    forks.run(config)
    assert [event["step"] for event in events(tmp_path / "run", "loss_spike")] == [7, 8]
    assert len(events(tmp_path / "run", "rollback")) == 1
    assert runs.logged_steps(tmp_path / "run") == [*range(1, 8), *range(5, 13)]


def test_with_nothing_to_go_back_to_it_goes_on(forks: Forks, tmp_path: Path) -> None:
    config = write_poisoned_run(tmp_path, (7,), max_rollbacks=1, save_at_start=False, save_interval=None)
    forks.run(config)
    assert len(events(tmp_path / "run", "rollback_impossible")) == 1
    assert runs.logged_steps(tmp_path / "run") == list(range(1, 13))


@pytest.mark.parametrize("poison", [(6,), (12,)], ids=["to-the-start", "at-the-last-step"])
def test_at_the_ends_of_a_run(forks: Forks, tmp_path: Path, poison: tuple[int, ...]) -> None:
    """Back to the checkpoint from before the first step, which holds no optimizer; and a spike at the very end."""
    config = write_poisoned_run(tmp_path, poison, max_rollbacks=1, save_interval=8)
    forks.run(config)
    run_dir = tmp_path / "run"
    (back,) = events(run_dir, "rollback")
    assert (back["from_step"], back["step"]) == ((6, 0) if poison == (6,) else (12, 8))
    assert max(runs.losses(run_dir)) == 12
    assert (run_dir / "latest").resolve().name == "checkpoint-12"
    if poison == (6,):
        _, order = open_run_data(run_dir, [], 1)
        assert read_data_indices(data_indices_path(run_dir, 0))[1] == ids_of_step(order, 7).tolist()
        assert runs.losses(run_dir)[1][0] == pytest.approx(4.85, abs=0.2), "fresh weights: about ln 128"


@pytest.mark.parametrize(
    ("ranks", "env"), [(2, {}), pytest.param(2, FSDP, marks=pytest.mark.slow)], ids=["ddp", "fsdp2"]
)
def test_all_ranks_go_back_together(went_back: Path, forks: Forks, tmp_path: Path, ranks: int, env: dict) -> None:
    config = write_poisoned_run(tmp_path, POISON, max_rollbacks=3, dropout=0.0)
    alone = write_poisoned_run(tmp_path / "alone", POISON, max_rollbacks=3, dropout=0.0)
    launch = forks.start(config, ranks=ranks, **env)
    launch.until(lambda: runs.logged_steps(tmp_path / "run").count(5) >= 3)
    launch.kill()
    forks.run(config, ranks=ranks, **env)
    forks.run(alone)
    assert read_returns(tmp_path / "run") == read_returns(went_back)
    here, there = runs.losses(tmp_path / "run"), runs.losses(tmp_path / "alone" / "run")
    for step in range(1, 13):
        # Another number of ranks adds up in another order; 1e-5 is what restarts promise.
        # So do losses; the gradient's norm, stirred by AdamW's first updates, is given ten times that. Another batch
        # moves both by a tenth and more.
        assert here[step] == pytest.approx(there[step], rel=1e-4), step
        assert here[step][0] == pytest.approx(there[step][0], rel=1e-5), step
    own = [read_data_indices(data_indices_path(tmp_path / "run", rank)) for rank in (0, 1)]
    _, order = open_run_data(tmp_path / "run", [], 2)
    assert [own[rank][9] for rank in (0, 1)] == [ids_of_step(order, 16)[rank::2].tolist() for rank in (0, 1)]


def test_stopped_at_the_spike_the_next_launch_goes_back(went_back: Path, forks: Forks, tmp_path: Path) -> None:
    config = write_poisoned_run(tmp_path, POISON, max_rollbacks=3)
    codes = forks.start(config, prepare="tests.crash.cancel_at", CANCEL_AT="7").wait()
    assert codes == [3]
    assert (tmp_path / "run" / "latest").resolve().name == "checkpoint-4", "the steps of the spike are not kept"
    forks.run(config)
    runs.same_run(tmp_path / "run", went_back)


def test_data_workers_and_saving_in_the_background(went_back: Path, forks: Forks, tmp_path: Path) -> None:
    config = write_poisoned_run(tmp_path, POISON, max_rollbacks=3, checkpoint_async=True)
    forks.run(config, "--data.num_workers=2")
    runs.same_run(tmp_path / "run", went_back)
