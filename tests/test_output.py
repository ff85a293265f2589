"""Streams that fail: the reader is gone, the log is on a full disk, the output is closed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from olmo_hf.training import commit
from tests import runs
from tests.forks import Forks

FULL = "/dev/full"
"""A device to which every write fails as on a full disk."""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    starter = Forks(tmp_path_factory.mktemp("forks"))
    yield starter
    starter.close()


def shell(words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", words], cwd=directory, env=runs.environment(), capture_output=True, text=True, timeout=120
    )


CODE = """
import sys
from olmo_hf.output import keep_output

keep_output()
for number in range(100_000):
    print("a line of some length", number, flush=number % 10 == 0)
    if number % 1_000 == 0:
        sys.stderr.write("note\\n")
open("done", "w").write("yes")
sys.exit(5)
"""


@pytest.mark.parametrize(
    "streams", ["| head -n 1", f"> {FULL}", f"2> {FULL}", f"> {FULL} 2>&1", ">&-", "2>&-", "<&- >&- 2>&-", ""]
)
def test_what_cannot_be_written_ends_nothing(tmp_path: Path, streams: str) -> None:
    (tmp_path / "code.py").write_text(CODE)
    done = shell(f"{sys.executable} code.py {streams}; echo ${{PIPESTATUS[0]}} > code", tmp_path)
    assert (tmp_path / "code").read_text() == "5\n", done.stderr[-2000:]
    assert (tmp_path / "done").read_text() == "yes", "written to its own file, though descriptor 1 was free"
    assert "Traceback" not in done.stderr
    if streams in ("| head -n 1", f"> {FULL}"):
        assert done.stderr.count("standard output is lost from here on") == 1
    if not streams:
        assert done.stdout.count("\n") == 100_000


def test_a_run_whose_log_is_on_a_full_disk_trains_to_the_end(forks: Forks, tmp_path: Path) -> None:
    config = runs.write_run(tmp_path, max_duration=3, save_interval=3)
    (tmp_path / "log.txt").symlink_to(FULL)
    assert forks.start(config, "--callbacks.console.style=lines").wait() == [0]
    assert runs.logged_steps(tmp_path / "run") == [1, 2, 3]
    newest, _ = commit.newest_whole(tmp_path / "run")
    assert newest is not None
    assert commit.step_of(newest) == 3


@pytest.mark.parametrize("words", ["--help", "", "report --help", "inspect-data --help"])
def test_commands_whose_reader_is_gone_say_nothing_of_it(tmp_path: Path, words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "olmo_hf.cli.main", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=runs.environment(), stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
