import json
import math
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from olmo_hf.callbacks.json_lines import JsonLinesFile, read_json_lines, strict_json


def test_rows_come_back_and_the_file_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    file = JsonLinesFile(path)
    file.append({"step": 1, "loss": 0.1})
    file.append({"step": 2, "loss": math.nan, "high": math.inf, "low": -math.inf})
    file.append({"step": 3, "tensor": torch.tensor(2.5), "array": np.float32(0.5), "list": [math.nan]})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    first, second, third = read_json_lines(path)
    assert first == {"step": 1, "loss": 0.1}
    assert math.isnan(second["loss"])
    assert (second["high"], second["low"]) == (math.inf, -math.inf)
    assert third == {"step": 3, "tensor": 2.5, "array": 0.5, "list": ["NaN"]}


def test_floats_keep_every_bit(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 1e-300, 123456789.123456789]
    JsonLinesFile(tmp_path / "x").append({str(i): value for i, value in enumerate(values)})
    assert list(next(read_json_lines(tmp_path / "x")).values()) == values


def test_a_row_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    file = JsonLinesFile(tmp_path / "x")
    for step in range(3):
        file.append({"step": step})
        assert [row["step"] for row in read_json_lines(tmp_path / "x")] == list(range(step + 1))


def test_a_torn_last_line_spoils_neither_itself_nor_the_next(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    JsonLinesFile(path).append({"step": 3})
    assert [row["step"] for row in read_json_lines(path)] == [1, 3]


def test_a_full_disk_costs_no_row_and_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x"
    path.symlink_to("/dev/full")
    file = JsonLinesFile(path)
    file.append({"step": 1})
    file.append({"step": 2})
    assert caplog.text.count("cannot be written") == 1, "said once, not at every step"
    assert "No space left" in caplog.text
    path.unlink()
    file.append({"step": 3})
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 3]
    assert "is written again" in caplog.text


def test_half_a_line_on_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "x"
    file = JsonLinesFile(path)
    file.append({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        file.append({"step": 2})
        file.append({"step": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.read_bytes().endswith(b"\n"), "the limit must have cut a line, or nothing is tested"
    file.append({"step": 4})
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 3, 4]


def test_a_directory_in_the_way_is_survived(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    JsonLinesFile(tmp_path / "x").append({"step": 1})


def test_strict_json_leaves_plain_values_alone() -> None:
    value = {"a": [1, 2.5, "x", None, True]}
    assert strict_json(value) == value
