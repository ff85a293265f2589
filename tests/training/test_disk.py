"""Who writes: one process per file system."""

import os
from pathlib import Path
from typing import Any

import pytest

from olmo_hf.training import disk
from olmo_hf.training.disk import Disk, find_disk


def look(rank: int, directories: list[str], local_ranks: list[str]) -> list[Any]:
    os.environ["LOCAL_RANK"] = local_ranks[rank]
    disk.PATIENCE_SECONDS = 0.2
    found = find_disk(Path(directories[rank]))
    return [list(found.ranks), found.is_writer, os.listdir(directories[rank])]


def test_alone(tmp_path: Path) -> None:
    assert find_disk(tmp_path) == Disk((0,), is_writer=True)


@pytest.mark.parametrize("local_ranks", [["0", "1"], ["0", "0"]], ids=["one-machine", "two-machines"])
def test_all_see_the_same_files(two_ranks: Any, tmp_path: Path, local_ranks: list[str]) -> None:
    found = two_ranks(look, [str(tmp_path / "run")] * 2, local_ranks)
    assert found == [[[0, 1], True, []], [[0, 1], False, []]]


def test_each_machine_has_a_disk(two_ranks: Any, tmp_path: Path) -> None:
    found = two_ranks(look, [str(tmp_path / "a"), str(tmp_path / "b")], ["0", "0"])
    assert found == [[[0], True, []], [[1], True, []]]
