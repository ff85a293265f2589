"""Files of module outputs, side by side."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from olmo_hf.cli.main import main
from olmo_hf.report.outputs import compare_outputs


def write(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path, metadata={"order": json.dumps(list(tensors))})
    return path


def test_differences_come_in_the_order_of_computation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", b=torch.ones(2), a=torch.tensor([4.0, -8.0]), c=torch.ones(3), d=torch.ones(1))
    changed = torch.tensor([4.0, -8.5])
    other = write(tmp_path / "other", b=torch.ones(2), a=changed, c=torch.ones(2), e=torch.ones(1))
    found = {one.name: one for one in compare_outputs(one, other)}
    assert list(found) == ["b", "a", "c", "d", "e"]
    assert found["b"].is_equal
    assert (found["a"].largest, found["a"].scale) == (0.5, 8.0)
    assert [found[name].note for name in "cde"] == ["shapes (3,) and (2,)", "only in the first", "only in the second"]
    assert main(["compare-outputs", str(one), str(other)]) == 1
    assert "4 of 5 tensors differ, the first is a" in capsys.readouterr().out


def test_a_tolerance_is_relative_and_kinds_of_numbers_count(tmp_path: Path) -> None:
    one = write(tmp_path / "one", a=torch.tensor([100.0, torch.nan]))
    near = write(tmp_path / "near", a=torch.tensor([100.5, torch.nan]))
    half = write(tmp_path / "half", a=torch.tensor([100.0, torch.nan]).bfloat16())
    lost = write(tmp_path / "lost", a=torch.tensor([torch.nan, torch.nan]))
    assert compare_outputs(one, one)[0].is_equal, "no number is as good as no number"
    assert main(["compare-outputs", str(one), str(near)]) == 1
    assert main(["compare-outputs", str(one), str(near), "--tolerance", "0.01"]) == 0
    assert main(["compare-outputs", str(one), str(half), "--tolerance", "0.01"]) == 1
    assert main(["compare-outputs", str(one), str(lost), "--tolerance", "0.01"]) == 1


def test_other_files_are_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "plain")
    (tmp_path / "text").write_text("no tensors")
    for name in ("plain", "text", "missing"):
        assert main(["compare-outputs", str(tmp_path / name), str(tmp_path / name)]) == 2
        assert "is no file of module outputs" in capsys.readouterr().err
