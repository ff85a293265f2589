"""SIGTERM at every moment of a run, to every rank: a whole checkpoint or none, older ones intact, nothing lost."""

import random
import signal
import time
from pathlib import Path

import pytest
import yaml

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.callbacks.json_lines import EVENTS_FILE, read_json_lines
from olmo_hf.training import commit
from tests import runs
from tests.crash.conftest import Undisturbed
from tests.forks import Forks

SECONDS_TO_EXIT = 10.0
"""From the signal to the end of the process, as the field report asks; a tiny run needs a tenth of that."""


def write_evaluated_run(directory: Path) -> Path:
    config = runs.write_run(directory)
    settings = yaml.safe_load(config.read_text())
    data = {"paths": [str(directory / "tokens.npy")], "token_dtype": "uint16", "sequence_length": 16}
    settings["evaluation"] = {"interval": 5, "evaluators": [{"label": "held-out", "data": data}]}
    config.write_text(yaml.safe_dump(settings))
    return config


@pytest.mark.parametrize(
    ("moment", "code", "checkpoint"),
    [
        # Nothing is trained yet: the process ends as any other does, which a shell shows as 128 + 15.
        pytest.param("dataset", -signal.SIGTERM, None, id="dataset"),
        pytest.param("first-batch", 128 + signal.SIGTERM, 1, id="first-batch"),
        pytest.param("evaluation", 128 + signal.SIGTERM, 6, id="evaluation"),
        pytest.param("save", 128 + signal.SIGTERM, 7, id="save"),
        # The run is over: there is nothing to stop.
        pytest.param("last-save", 0, 12, id="last-save"),
        pytest.param("after-the-last-step", 0, 12, id="after-the-last-step"),
    ],
)
def test_sigterm_at_a_moment(
    undisturbed: Undisturbed, forks: Forks, tmp_path: Path, moment: str, code: int, checkpoint: int | None
) -> None:
    config, run_dir = write_evaluated_run(tmp_path), tmp_path / "run"
    noted = tmp_path / "signalled"
    launch = forks.start(config, prepare="tests.crash.signal_self", SIGNAL_AT=moment, SIGNALLED=str(noted))
    codes = launch.wait()
    seconds = time.time() - float(noted.read_text())
    assert codes == [code], (tmp_path / "log.txt").read_text()[-2000:]
    assert seconds < SECONDS_TO_EXIT
    assert not list(run_dir.glob(".staging-*"))
    newest, passed_over = commit.newest_whole(run_dir)
    assert passed_over == []
    assert (None if newest is None else commit.step_of(newest)) == checkpoint
    if moment in ("save", "after-the-last-step"):
        assert (run_dir / "checkpoint-6").is_dir(), "what was being saved is whole too"
    forks.run(config)
    runs.same_run(run_dir, undisturbed["one"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_long_evaluation_is_cut_short(forks: Forks, tmp_path: Path, ranks: int) -> None:
    """One that would take minutes, with the signal at the rank that does not speak for the run."""
    config, run_dir = write_evaluated_run(tmp_path), tmp_path / "run"
    settings = yaml.safe_load(config.read_text())
    with open(tmp_path / "long.npy", "wb") as file:
        file.truncate(2 * 16 * 400_000)  # zeros that take no room
    settings["evaluation"]["evaluators"][0]["data"]["paths"] = [str(tmp_path / "long.npy")]
    config.write_text(yaml.safe_dump(settings))
    launch = forks.start(config, ranks=ranks)
    launch.until(lambda: 5 in runs.logged_steps(run_dir))
    time.sleep(1.0)
    began = time.monotonic()
    launch.signal(signal.SIGTERM, [ranks - 1])
    assert launch.wait(timeout_seconds=60) == [128 + signal.SIGTERM, 0][:ranks]
    assert time.monotonic() - began < SECONDS_TO_EXIT
    said = (tmp_path / "log.txt").read_text()
    assert said.count("this evaluation was cut short after 0 of 1 evaluators") == 1
    assert not any("eval/" in line for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    newest, passed_over = commit.newest_whole(run_dir)
    assert newest is not None
    assert (commit.step_of(newest), passed_over) == (6, [])


def test_a_second_signal_ends_it_at_once(forks: Forks, tmp_path: Path) -> None:
    config, noted = write_evaluated_run(tmp_path), tmp_path / "signalled"
    env = {"SIGNAL_AT": "evaluation", "SIGNALLED": str(noted), "SIGNAL_TIMES": "2"}
    codes = forks.start(config, prepare="tests.crash.signal_self", **env).wait()
    assert codes == [-signal.SIGTERM], "the second one does what it would have done without us"
    assert time.time() - float(noted.read_text()) < SECONDS_TO_EXIT
    newest, passed_over = commit.newest_whole(tmp_path / "run")
    assert newest is not None
    assert (commit.step_of(newest), passed_over) == (4, [])


def stop_one_of_two(forks: Forks, directory: Path, rank: int | None, *, after_seconds: float, step: float) -> float:
    """Signals one rank of two, or leaves a file that only rank 0 looks at; returns the seconds until both ended."""
    config, run_dir = runs.write_run(directory, save_interval_ephemeral=None), directory / "run"
    launch = forks.start(config, ranks=2, prepare="tests.crash.slow_steps", STEP_SECONDS=str(step))
    launch.until(lambda: 1 in runs.logged_steps(run_dir))
    time.sleep(after_seconds)
    began = time.monotonic()
    if rank is None:
        (run_dir / "CANCEL").touch()
    else:
        launch.signal(signal.SIGTERM, [rank])
    codes = launch.wait(timeout_seconds=60)
    seconds = time.monotonic() - began
    assert codes == [3 if rank is None else 128 + signal.SIGTERM, 0], "rank 0 says why, the other one ends in peace"
    cancelled = [event["step"] for event in read_json_lines(run_dir / EVENTS_FILE) if event["event"] == "cancel"]
    assert len(cancelled) == 1
    stopped = cancelled[0]
    assert [max(read_data_indices(data_indices_path(run_dir, one))) for one in (0, 1)] == [stopped, stopped]
    newest, passed_over = commit.newest_whole(run_dir)
    assert newest == run_dir / f"checkpoint-{stopped}"
    assert passed_over == []
    assert not list(run_dir.glob(".staging-*"))
    forks.run(config, ranks=2)
    return seconds


@pytest.mark.parametrize("rank", [1, None], ids=["rank-1", "file"])
def test_one_of_two_ranks_is_told(undisturbed: Undisturbed, forks: Forks, tmp_path: Path, rank: int | None) -> None:
    assert stop_one_of_two(forks, tmp_path, rank, after_seconds=0.1, step=0.1) < SECONDS_TO_EXIT
    runs.same_run(tmp_path / "run", undisturbed["ddp"])


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(20))
def test_twenty_tries(undisturbed: Undisturbed, forks: Forks, tmp_path: Path, attempt: int) -> None:
    rank = [0, 1, 0, 1, None][attempt % 5]
    moment = random.Random(attempt).uniform(0, 2.4)  # of steps that last 0.3 s and more
    assert stop_one_of_two(forks, tmp_path, rank, after_seconds=moment, step=0.3) < SECONDS_TO_EXIT
    runs.same_run(tmp_path / "run", undisturbed["ddp"])
