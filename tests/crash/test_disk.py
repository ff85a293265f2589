"""A disk that is full or read-only: a sentence, a non-zero exit code, and nothing that existed is harmed."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from olmo_hf.training import commit
from tests import runs
from tests.crash.conftest import Undisturbed
from tests.forks import Forks

Mount = Callable[[int], Path]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Mount]:
    """Makes a file system of so many kilobytes."""
    mounted: list[Path] = []

    def mount(kilobytes: int) -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"a small file system needs the right to mount one: {done.stderr.strip()}")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def fails(forks: Forks, config: Path) -> str:
    """What a run that must fail printed since the last call; it must exit with 2."""
    log = config.parent / "log.txt"
    log.unlink(missing_ok=True)
    assert forks.start(config).wait() == [2]
    return log.read_text(errors="replace")


def test_a_disk_too_small_is_found_before_the_first_step(forks: Forks, tmp_path: Path, small_disk: Mount) -> None:
    disk = small_disk(250)
    config = runs.write_run(tmp_path, output_dir=str(disk / "run"))
    text = fails(forks, config)
    assert "error:" in text
    assert "a checkpoint needs" in text
    assert "are free" in text
    assert "Traceback" not in text
    assert runs.logged_steps(disk / "run") == []
    assert commit.list_checkpoints(disk / "run") == []


def test_a_read_only_disk_is_found_before_the_first_step(forks: Forks, tmp_path: Path, small_disk: Mount) -> None:
    disk = small_disk(4000)
    (disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    config = runs.write_run(tmp_path, output_dir=str(disk / "run"))
    text = fails(forks, config)
    assert "cannot write here" in text
    assert str(disk / "run") in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("free_kilobytes", "reason"),
    [pytest.param(100, "a checkpoint needs", id="before"), pytest.param(372, "No space left", id="in-the-middle")],
)
def test_a_disk_that_fills_up_costs_nothing(
    undisturbed: Undisturbed, forks: Forks, tmp_path: Path, small_disk: Mount, free_kilobytes: int, reason: str
) -> None:
    disk = small_disk(4000)
    config = runs.write_run(tmp_path, output_dir=str(disk / "run"))
    forks.run(config, "--training.stop_after=4")
    before = commit.read_manifest(disk / "run" / "checkpoint-4")

    statistics = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(b"0" * (statistics.f_bavail * statistics.f_frsize - free_kilobytes * 1024))
    text = fails(forks, config)
    assert "checkpoint-6" in text
    assert reason in text
    assert "Older checkpoints are untouched" in text
    assert "Traceback" not in text
    assert commit.verify(disk / "run" / "checkpoint-4") == before
    assert not list((disk / "run").glob(".staging*")), "the space of the failed attempt is given back"

    filler.unlink()
    forks.run(config)
    runs.same_run(disk / "run", undisturbed["one"])


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Makes a directory read-only for root too, under the feet of whoever works there."""
    mounted: list[Path] = []

    def make(path: Path) -> None:
        subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
        mounted.append(path)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(path)], check=True)

    yield make
    for path in mounted:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_directory_made_read_only_costs_nothing(
    undisturbed: Undisturbed, forks: Forks, tmp_path: Path, small_disk: Mount, read_only: Callable[[Path], None]
) -> None:
    """While the run trains, between two saves; as file systems do by themselves when the disk under them fails."""
    run_dir = small_disk(4000) / "run"
    config = runs.write_run(tmp_path, output_dir=str(run_dir), save_interval_ephemeral=None)
    launch = forks.start(config)
    launch.until(lambda: (run_dir / "checkpoint-6").is_dir())
    launch.signal(signal.SIGSTOP)
    read_only(run_dir)
    launch.signal(signal.SIGCONT)
    assert launch.wait() == [2]
    text = (tmp_path / "log.txt").read_text(errors="replace")
    assert "cannot write" in text
    assert "Read-only file system" in text
    assert "Older checkpoints are untouched" in text
    commit.verify(run_dir / "checkpoint-6")
    text = fails(forks, config)
    assert "cannot write here" in text
    assert "Traceback" not in text
    subprocess.run(["mount", "-o", "remount,bind,rw", str(run_dir)], check=True)
    forks.run(config)
    runs.same_run(run_dir, undisturbed["one"])
