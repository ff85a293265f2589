"""Real runs, stopped from outside: the same step on every rank, one whole checkpoint, and nothing lost."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.callbacks.json_lines import EVENTS_FILE, METRICS_FILE, read_json_lines
from tests import runs


def wait_for(condition: Callable[[], bool], process: subprocess.Popen, timeout_seconds: float = 120) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.002)


def process_of_rank(launcher: subprocess.Popen, rank: int) -> int:
    """Process id of a rank under torchrun."""
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no process of rank {rank}")


def stopped_at(run_dir: Path) -> int:
    """The step of the cancellation, on record."""
    events = [event for event in read_json_lines(run_dir / EVENTS_FILE) if event["event"] == "cancel"]
    assert len(events) == 1
    return events[0]["step"]


def test_sigterm_then_the_same_command_again(undisturbed: Path, tmp_path: Path) -> None:
    config, run_dir = runs.write_run(tmp_path, save_interval_ephemeral=None), tmp_path / "run"
    process = runs.start(config, "--callbacks.cancellation.extra_steps=2")
    wait_for(lambda: 3 in runs.logged_steps(run_dir), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    step = stopped_at(run_dir)
    assert 3 < step <= 6
    assert (run_dir / "latest").resolve().name == f"checkpoint-{step}"
    assert runs.logged_steps(run_dir) == list(range(1, step + 3)), "two more steps, whose metrics overlap"
    before = runs.losses(run_dir)
    runs.run(config)
    assert runs.losses(run_dir).items() >= before.items(), "the overlap is equal to the last bit"
    runs.same_run(run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_of_two_ranks_stops_both_at_the_same_step(tmp_path: Path, rank: int) -> None:
    reference = runs.write_run(tmp_path / "reference", save_interval_ephemeral=None)
    runs.run(reference, processes=2)
    config, run_dir = runs.write_run(tmp_path, save_interval_ephemeral=None), tmp_path / "run"
    process = runs.start(config, processes=2)
    wait_for(lambda: 3 in runs.logged_steps(run_dir), process)
    os.kill(process_of_rank(process, rank), signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    step = stopped_at(run_dir)
    assert (run_dir / "latest").resolve().name == f"checkpoint-{step}"
    assert [max(read_data_indices(data_indices_path(run_dir, r))) for r in (0, 1)] == [step, step]
    assert not list(run_dir.glob(".staging*"))
    runs.run(config, processes=2)
    runs.same_run(run_dir, tmp_path / "reference" / "run")


@pytest.mark.slow
def test_the_whole_group_is_signalled_and_the_launcher_passes_it_on(tmp_path: Path) -> None:
    config, run_dir = runs.write_run(tmp_path, save_interval_ephemeral=None), tmp_path / "run"
    process = runs.start(config, "--data.num_workers=1", processes=2)
    wait_for(lambda: 3 in runs.logged_steps(run_dir), process)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=60) != 0
    step = stopped_at(run_dir)
    assert (run_dir / "latest").resolve().name == f"checkpoint-{step}"
    assert not list(run_dir.glob(".staging*"))


@pytest.mark.slow
def test_time_limit(tmp_path: Path) -> None:
    config = runs.write_run(tmp_path, max_duration=100_000, save_interval=None, save_interval_ephemeral=None)
    process = runs.start(config, "--callbacks.cancellation.time_limit_seconds=5")
    assert process.wait(timeout=120) == 75
    events = {event["event"]: event for event in read_json_lines(tmp_path / "run" / EVENTS_FILE)}
    assert events["cancel"]["reason"] == "time limit"
    assert 5 <= events["checkpoint"]["time"] - events["start"]["time"] <= 6.5 + 1.0  # a busy machine saves slowly
    assert events["checkpoint"]["step"] == events["cancel"]["step"] == events["end"]["step"]


@pytest.mark.slow
def test_a_file_stops_a_run(tmp_path: Path) -> None:
    config, run_dir = runs.write_run(tmp_path, max_duration=100_000, save_interval=None), tmp_path / "run"
    process = runs.start(config)
    wait_for(lambda: 3 in runs.logged_steps(run_dir), process)
    (run_dir / "CANCEL").touch()
    assert process.wait(timeout=60) == 3
    assert not (run_dir / "CANCEL").exists()
    assert (run_dir / "latest").resolve().name == f"checkpoint-{stopped_at(run_dir)}"
    rows = list(read_json_lines(run_dir / METRICS_FILE))
    assert rows[-1]["step"] == stopped_at(run_dir)
