"""`make bench`: a report for each benchmark, whatever becomes of it."""

from pathlib import Path

import pytest

from benchmarks import suite


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    """Three benchmarks, one of which fails, and one for GPUs."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "good.py").write_text("import sys\nprint('| figure | 1 |', sys.argv[1:])\n")
    (folder / "bad.py").write_text("import sys\nprint('| figure | 2 |')\nsys.exit('too slow')\n")
    (folder / "speed.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (folder / "gpu_check.py").write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(suite, "FOLDER", folder)
    monkeypatch.setattr(suite, "has_gpu", lambda: False)
    return tmp_path / "reports"


def run(monkeypatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["suite", *map(str, words)])
    return suite.main()


def test_every_benchmark_leaves_a_report_and_a_failure_stops_no_other(benchmarks, monkeypatch, capsys):
    assert run(monkeypatch, "--output", benchmarks) == 1
    assert sorted(path.name for path in benchmarks.iterdir()) == ["bad.md", "good.md", "speed.md"]
    said = capsys.readouterr().out
    assert "bad: missed or failed" in said
    assert "good: fine" in said
    assert "gpu_check: left out, no GPU here" in said
    good, bad = (benchmarks / "good.md").read_text(), (benchmarks / "bad.md").read_text()
    for words in ("- machine: ", " cores, ", "- versions: Python 3", "torch 2", "- commit: ", "| figure | 1 |"):
        assert words in good
    assert "- command: `python benchmarks/good.py`" in good
    assert "| figure | 2 |" in bad
    assert "too slow" in bad


def test_chosen_ones_and_the_interpreter_of_the_original(benchmarks, monkeypatch, capsys):
    assert run(monkeypatch, "speed", "--output", benchmarks, "--original-python", "/there/bin/python") == 0
    assert [path.name for path in benchmarks.iterdir()] == ["speed.md"]
    assert "['--original-python', '/there/bin/python']" in (benchmarks / "speed.md").read_text()


def test_an_unknown_name_is_refused_with_those_there_are(benchmarks, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "sped", "--output", benchmarks)
    assert "no such benchmark: sped; there are bad, good, gpu_check, speed" in capsys.readouterr().err


def test_the_real_ones_are_found():
    assert {"speed", "growth", "step_counts", "start_up", "flat_memory", "gpu_check"} <= set(suite.names())
    assert not {"suite", "promises"} & set(suite.names())
    assert all((Path(suite.FOLDER) / f"{name}.py").is_file() for name in suite.names())
