"""Where memory is short the processes of a machine read one after another; otherwise none waits for another."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from olmo_hf.training import turns
from olmo_hf.training.checked_files import CheckedFiles
from olmo_hf.training.readers import ShardedReader, StreamingReader
from olmo_hf.training.tensors import model_table
from tests.training.test_checked_files import save
from tests.training.test_memory_of_ranks import build

MEMORY = "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    {} kB\n"


def _part(tensor: Any) -> torch.Tensor:
    """What this rank holds."""
    return tensor.to_local()


def read_slowly(rank: int, folder: str, available_kilobytes: int, tmp: str) -> list[Any]:
    """When this rank began and ended to read its part, and whether it was read right."""
    checkpoint = Path(folder) / "checkpoint-1"
    save(rank, checkpoint, "sharded")
    model, _ = build(64)
    expected = [_part(parameter).clone() for parameter in model.parameters()]
    info = Path(folder) / f"memory-{rank}"
    info.write_text(MEMORY.format(available_kilobytes))
    times: list[float] = []
    slice_file = StreamingReader._slice_file

    def slowly(self: StreamingReader, file: Any, sinfo: Any) -> Any:
        times.append(time.monotonic())
        time.sleep(0.02)
        times.append(time.monotonic())
        return slice_file(self, file, sinfo)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(turns, "MEMORY_INFO", info)
        changed.setattr(turns.tempfile, "gettempdir", lambda: tmp)
        changed.setattr(StreamingReader, "_slice_file", slowly)
        table = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in model_table(model).items()}
        torch.distributed.barrier()
        ShardedReader(checkpoint / "sharded").fill(table, CheckedFiles(checkpoint))
    same = all(torch.equal(_part(a), b) for a, b in zip(table.values(), expected, strict=True))
    return [min(times), max(times), same]


@pytest.mark.parametrize(
    ("available_kilobytes", "in_turn"), [(100, True), (10_000_000, False)], ids=["short", "ample"]
)
def test_ranks_take_turns_where_memory_is_short(
    two_ranks: Any, tmp_path: Path, available_kilobytes: int, in_turn: bool
) -> None:
    (tmp_path / "tmp").mkdir()
    (first, first_end, _), (second, second_end, _) = answers = two_ranks(
        read_slowly, str(tmp_path), available_kilobytes, str(tmp_path / "tmp")
    )
    assert all(same for _, _, same in answers)
    apart = first_end <= second or second_end <= first
    assert apart == in_turn
    assert bool(list((tmp_path / "tmp").iterdir())) == in_turn


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max\n", 500 * 1024), (str(300_000), 300_000 - 250_000 + 100_000), ("", 500 * 1024)],
    ids=["no-limit", "limit", "unreadable"],
)
def test_the_limit_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, expected: int
) -> None:
    files = {"meminfo": MEMORY.format(500), "memory.max": limit, "memory.current": "250000\n"}
    files["memory.stat"] = "anon 150000\nfile 100000\nslab 3\n"
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(turns, "MEMORY_INFO", tmp_path / "meminfo")
    monkeypatch.setattr(turns, "CGROUP", tmp_path)
    assert turns.available_bytes() == expected


def test_a_process_alone_takes_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with turns.own_turn(1 << 60) as in_turn:
        assert not in_turn
