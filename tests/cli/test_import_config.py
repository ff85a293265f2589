"""`olmo-hf import-config` as a person types it."""

import json

import pytest

from olmo_hf.cli.main import main
from olmo_hf.config_file import load_run
from tests.recipes.original import write


def test_a_file_is_written_with_its_report(tmp_path, capsys):
    ours, report = tmp_path / "new" / "ours.yaml", tmp_path / "report.json"
    words = ["import-config", str(write(tmp_path)), "-o", str(ours), "--report", str(report)]
    assert main([*words, "--as", "executed", "--optimizer.learning_rate=9e-4"]) == 0
    run = load_run(ours)
    assert (run.training.learning_rate, run.training.max_duration) == (9e-4, 70)
    assert json.loads(report.read_text())["as"] == "executed"
    printed = capsys.readouterr().out
    assert "0 refused" in printed
    assert "optimizer.learning_rate" in printed
    opening = ours.read_text().split("\n")[2]
    assert opening.endswith(f"train_hf.py {ours}")


def test_strict_writes_nothing_when_a_key_is_refused(tmp_path, capsys):
    ours = tmp_path / "ours.yaml"
    words = ["import-config", str(write(tmp_path, {"optimizer.momentum": 1})), "-o", str(ours)]
    assert main([*words, "--strict"]) == 2
    assert not ours.exists()
    assert "optimizer.momentum" in capsys.readouterr().out
    assert main(words) == 0
    assert "Refused: optimizer.momentum" in ours.read_text()


def test_nothing_is_overwritten_unasked(tmp_path, capsys):
    ours = tmp_path / "ours.yaml"
    ours.write_text("name: mine\n")
    words = ["import-config", str(write(tmp_path)), "-o", str(ours)]
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert ours.read_text() == "name: mine\n"
    assert main([*words, "--force"]) == 0


def test_other_verbs_still_refuse_unknown_words(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        main(["convert", "a", "b", "--no.such=1"])
    assert stopped.value.code == 2
