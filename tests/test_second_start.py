"""Starting a second time into a directory that holds a run: nothing is overwritten, and the answer is one line."""

import shutil

import pytest

from olmo_hf.errors import CheckpointError
from olmo_hf.training.run_directory import open_run


@pytest.fixture
def first_run(tmp_path):
    """A run directory as a first launch leaves it before its first checkpoint."""
    directory = tmp_path / "runs" / "mine"
    with open_run(directory, resume="auto", name="mine"):
        (directory / "config.yaml").write_text("name: mine\n")
        (directory / "metrics.jsonl").write_text('{"step": 1}\n')
    return directory


def listing(directory):
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != ".lock"}


def refusal(directory, **how):
    before = listing(directory)
    with pytest.raises(CheckpointError) as caught, open_run(directory, **how):
        pass
    assert listing(directory) == before
    assert "\n" not in str(caught.value)
    assert directory.name in str(caught.value)
    return str(caught.value)


def test_the_same_command_continues_without_any_flag(first_run):
    with open_run(first_run, resume="auto", name="mine") as opened:
        assert opened.state.step == 0


def test_another_run_in_the_same_directory_is_refused_before_anything_is_written(first_run):
    sentence = refusal(first_run, resume="auto", name="yours")
    assert "mine" in sentence
    assert "yours" in sentence


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again(first_run):
    (first_run / "checkpoint-3").mkdir()
    (first_run / "checkpoint-3" / "manifest.json").write_text("{}")
    for resume in ("auto", "never"):
        assert "checkpoint-3" in refusal(first_run, resume=resume, name="mine")


def test_checkpoints_without_the_file_that_names_the_run(first_run):
    (first_run / "checkpoint-3").mkdir()
    (first_run / "notes.txt").write_text("x")
    (first_run / "config.yaml").unlink()
    assert "holds checkpoints, but no config.yaml" in refusal(first_run, resume="auto", name="mine")
    (first_run / "config.yaml").write_bytes(b"\xff\x00")
    assert "write `name: mine` into it" in refusal(first_run, resume="auto", name="mine")
    (first_run / "config.yaml").write_text("name: mine\n")
    shutil.rmtree(first_run / "checkpoint-3")
    with open_run(first_run, resume="auto", name="mine") as opened:
        assert opened.state.step == 0


def test_below_a_file_there_is_no_directory_and_a_dry_run_says_so(tmp_path):
    (tmp_path / "file").write_text("x")
    for directory in (tmp_path / "file", tmp_path / "file" / "a" / "b"):
        with (
            pytest.raises(CheckpointError, match=f"{tmp_path}/file: is a file; set training.output_dir"),
            open_run(directory, resume="auto", name="mine", dry_run=True),
        ):
            pass
    with open_run(tmp_path / "new" / "x", resume="auto", name="mine", dry_run=True):
        assert not (tmp_path / "new").exists()


def test_a_directory_in_use_is_refused(first_run):
    with open_run(first_run, resume="auto", name="mine"):
        sentence = refusal(first_run, resume="auto", name="mine")
    assert "use" in sentence


def test_a_directory_of_other_things_is_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    refusal(tmp_path / "photos", resume="auto", name="mine")


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path, first_run):
    with (
        pytest.raises(CheckpointError, match="nowhere"),
        open_run(tmp_path / "fresh", resume=str(tmp_path / "nowhere"), name="fresh"),
    ):
        pass
