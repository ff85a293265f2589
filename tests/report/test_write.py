import struct
from pathlib import Path

import pytest

from olmo_hf.cli.main import main
from olmo_hf.errors import DataError
from olmo_hf.report.write import write_report
from tests.report.fake_run import make_run


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_the_verb_writes_page_and_pictures(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert "</html>" in (run_dir / "report.html").read_text()
    assert png_size(run_dir / "loss.png") == (1300, 1066)
    # The run has eight charts: four rows of two.
    assert png_size(run_dir / "charts.png") == (1500, 1260)


def test_several_runs_into_a_directory_of_their_own(tmp_path: Path, run_dir: Path) -> None:
    other = make_run(tmp_path / "other", seed=1)
    html, png, charts = write_report([run_dir, other], tmp_path / "compared")
    assert html == tmp_path / "compared" / "report.html"
    assert png_size(png) == (1300, 1066)
    assert charts == tmp_path / "compared" / "charts.png"
    assert png_size(charts) == (1500, 1260)


def test_mistakes_are_told_without_a_traceback(tmp_path: Path, run_dir: Path, capsys) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
    with pytest.raises(DataError, match="same name"):
        write_report([run_dir, run_dir])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_report([run_dir], tmp_path / "file" / "deep")
