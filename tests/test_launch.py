"""The command line of `train_hf.py`, and how failures are told to people."""

from pathlib import Path

import pytest
from torch.utils.data import DataLoader, Dataset

from olmo_hf.errors import CheckpointError, ConfigError, DataError
from olmo_hf.launch import Options, read_command_line, run_and_report, run_directory


def test_the_configuration_the_switches_and_the_rest():
    words = ["run.yaml", "--training.seed=3", "--dry_run", "--skip_data", "--no-evaluation.on_load"]
    expected = Options(
        Path("run.yaml"), dry_run=True, skip_data=True, overrides=["--training.seed=3", "--no-evaluation.on_load"]
    )
    assert read_command_line(words) == expected
    assert read_command_line(["run.yaml", "--dry-run"]) == Options(Path("run.yaml"), dry_run=True)


def test_only_a_dry_run_can_skip_its_data():
    with pytest.raises(ConfigError, match="--dry_run"):
        read_command_line(["run.yaml", "--skip_data"])


def fail(words):
    raise CheckpointError("first line\nthe disk is full")


def test_an_error_for_people_is_a_sentence_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("OLMO_HF_DEBUG", raising=False)
    assert run_and_report(fail, []) == 2
    said = capsys.readouterr().err
    assert "error: first line\nthe disk is full" in said
    assert "Traceback" not in said


class BadData(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        raise DataError("a.npy: cannot be read\nrestore it")


def test_an_error_in_a_loaders_worker_is_told_like_any_other(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("OLMO_HF_DEBUG", raising=False)
    assert run_and_report(lambda words: len(list(DataLoader(BadData(), num_workers=1))), []) == 2
    said = capsys.readouterr().err
    assert said.startswith("\nerror: a.npy: cannot be read\nrestore it\n(set")


def test_other_ranks_say_it_in_a_line(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert run_and_report(fail, []) == 2
    assert capsys.readouterr().err == "rank 3: error: the disk is full\n"


def test_a_script_that_restarts_is_told_by_a_file(tmp_path, monkeypatch):
    """For torchrun every other code than 0 is a failure."""
    file = tmp_path / "code"
    monkeypatch.setenv("OLMO_HF_EXIT_CODE_FILE", str(file))
    file.write_text("75\n")
    assert run_and_report(lambda words: 0, []) == 0
    assert not file.exists(), "what an earlier launch left is no answer of this one"
    assert run_and_report(lambda words: 138, []) == 0
    assert file.read_text() == "138\n"
    assert run_and_report(fail, []) == 0
    assert file.read_text() == "2\n"
    with pytest.raises(ZeroDivisionError):
        run_and_report(lambda words: 1 // 0, [])
    assert not file.exists(), "a fault may be tried again"


def test_only_rank_0_tells_a_launcher_of_a_stop(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert run_and_report(lambda words: 143, []) == 0


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"])
def test_the_launchers_traceback_is_announced(launcher, capsys, monkeypatch):
    for name in ("RANK", "OLMO_HF_DEBUG", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    assert run_and_report(fail, []) == 2
    assert "launcher" not in capsys.readouterr().err, "nobody prints one"
    monkeypatch.setenv(launcher, "no")
    assert run_and_report(fail, []) == 2
    assert capsys.readouterr().err.endswith(
        "(exit status 2; a traceback below this line is the launcher's own and says no more)\n"
    )
    assert run_and_report(lambda words: 3, []) == 3
    assert capsys.readouterr().err.startswith("(exit status 3; ")
    assert run_and_report(lambda words: 0, []) == 0
    assert capsys.readouterr().err == ""


def test_debugging_shows_where(capsys, monkeypatch):
    monkeypatch.setenv("OLMO_HF_DEBUG", "1")
    assert run_and_report(fail, []) == 2
    assert "in fail" in capsys.readouterr().err


def test_exit_codes_pass_through(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert run_and_report(lambda words: 143, []) == 143


@pytest.mark.parametrize(("given", "expected"), [("", Path("runs/mine")), ("/elsewhere/x", Path("/elsewhere/x"))])
def test_where_a_run_lives(given, expected):
    from olmo_hf.args import RunArgs
    from olmo_hf.training.args import TrainingArgs

    assert run_directory(RunArgs(name="mine", training=TrainingArgs(output_dir=given))) == expected
