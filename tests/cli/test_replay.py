"""The verb's mistakes; what it does is in tests/replay."""

from pathlib import Path

import pytest

from olmo_hf.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--step", "1"), "holds no metrics.jsonl; give the directory of a run"),
        (("--step", "1", "--tolerance", "nan"), "--tolerance: found nan, expected 0 or more"),
        (("--step", "1", "--tolerance", "-1"), "--tolerance: found -1.0, expected 0 or more"),
    ],
)
def test_mistakes_are_told_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert main(["replay", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_never_started_has_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 5.0, "train/CrossEntropyLoss": 2.0}\n')
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "holds no events.jsonl" in capsys.readouterr().err
    (tmp_path / "events.jsonl").write_text('{"step": 1, "time": 5.0, "event": "checkpoint"}\n')
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "tells of no start" in capsys.readouterr().err
