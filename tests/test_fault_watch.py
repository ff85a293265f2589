"""One rank fails, and all end soon: the thread that watches, and real processes that wait for one that is gone."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from olmo_hf import fault_watch
from olmo_hf.fault_watch import FaultWatch
from tests import runs
from tests.forks import Forks
from tests.invariants.test_split import FSDP

LIMIT_SECONDS = 60


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(fault_watch, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(fault_watch, "SILENCE_SECONDS", 0.5)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)


def another(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))


class Left:
    """Takes the place of `os._exit`."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append(code)
        self.happened.set()


def test_a_rank_that_fails_is_named_by_the_others(store: dist.TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    left = Left()
    watch = FaultWatch(another(store), leave=left)
    watch.start()
    FaultWatch(another(store)).announce("OSError: the disk is on fire", 7)
    assert left.happened.wait(10)
    assert left.codes == [7]
    assert "because rank 0 failed: OSError: the disk is on fire" in capfd.readouterr().err


def test_who_fails_too_says_so_itself(store: dist.TCPStore) -> None:
    left = Left()
    watch = FaultWatch(another(store), leave=left)
    watch.start()
    FaultWatch(another(store)).announce("first", 1)
    watch.announce("second", 1)
    time.sleep(0.5)
    assert not left.codes
    assert b"first" in another(store).get("fault"), "the first fault is the cause"
    watch.stop()


def test_the_end_of_the_run_ends_the_watch(store: dist.TCPStore) -> None:
    left = Left()
    watch = FaultWatch(another(store), leave=left)
    watch.start()
    watch.stop()
    FaultWatch(another(store)).announce("too late", 1)
    time.sleep(0.3)
    assert not left.codes


def test_a_silent_node_is_given_up(store: dist.TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = Left(), Left()
    watches = [
        FaultWatch(another(store), node=node, num_nodes=2, speaks=True, leave=left)
        for node, left in enumerate((first, second))
    ]
    for watch in watches:
        watch.start()
    time.sleep(1.0)
    assert not first.codes, "both speak"
    watches[1].stop()
    assert first.happened.wait(10)
    assert "node 1 has not been heard of" in capfd.readouterr().err


def test_without_its_launcher_a_process_does_not_go_on(store: dist.TCPStore) -> None:
    left = Left()
    FaultWatch(another(store), leave=left, launcher=os.getppid() + 1).start()
    assert left.happened.wait(10)


def end_of_both(forks: Forks, directory: Path, fault: str, **env: str) -> tuple[list[int], str, float]:
    """Exit codes of two ranks, what both printed, and the seconds between their ends; there is no launcher."""
    config = runs.write_run(directory)
    launch = forks.start(config, ranks=2, prepare="tests.failing_rank", FAULT=fault, **env)
    try:
        launch.until(lambda: launch.running() and launch.pids[1] in launch.codes)
        began = time.monotonic()
        while launch.running() and time.monotonic() - began < LIMIT_SECONDS:
            time.sleep(0.02)
        seconds = time.monotonic() - began
        assert not launch.running(), "the other one does not end"
        return [launch.codes[pid] for pid in launch.pids], (directory / "log.txt").read_text(), seconds
    finally:
        launch.kill()


@pytest.mark.parametrize(
    ("fault", "said", "code"),
    [
        ("RuntimeError: the cooling failed", "RuntimeError: the cooling failed", 1),
        ("OlmoHfError: no water", "no water", 2),
    ],
    ids=["a fault", "an error for people"],
)
def test_all_ranks_end_with_the_message_of_the_one_that_failed(
    forks: Forks, tmp_path: Path, fault: str, said: str, code: int
) -> None:
    """No launcher ends them, and rank 0 would wait for ever."""
    codes, text, seconds = end_of_both(forks, tmp_path, fault, WAITS="true")
    assert codes == [code, code]
    assert seconds < LIMIT_SECONDS
    assert f"rank 0 ends, because rank 1 failed: {said}" in text
    own_words = f"rank 1: error: {said}" if code == 2 else f"\n{said}\n"
    assert own_words in text


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, FSDP], ids=["DDP", "FSDP2"])
def test_a_rank_in_a_collective_of_training_ends_too(forks: Forks, tmp_path: Path, env: dict[str, str]) -> None:
    """It goes on into the step, where gradients or weights are to come from the one that has failed."""
    codes, text, seconds = end_of_both(forks, tmp_path, "RuntimeError: the cooling failed", **env)
    assert codes == [1, 1]
    assert seconds < LIMIT_SECONDS
    assert "rank 1 failed: RuntimeError: the cooling failed" in text
