"""Who may use a run directory, and what it continues from."""

import shutil
from pathlib import Path

import pytest

from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit
from olmo_hf.training.commit import Manifest
from olmo_hf.training.disk import Disk
from olmo_hf.training.run_directory import OpenedRun, changed_settings, open_run, record_launch
from olmo_hf.training.settling import describe_files
from olmo_hf.training.state import RUN_STATE, RunState, save_run_state


def make(run_dir: Path, step: int) -> Path:
    """A checkpoint that only knows where it stands."""
    staging = commit.staging_path(run_dir, step)
    staging.mkdir(parents=True)
    save_run_state(RunState(step=step, tokens=10 * step), staging)
    files = describe_files(staging, [RUN_STATE])
    final = commit.checkpoint_path(run_dir, step)
    commit.commit(
        staging, final, Manifest(kind="unsharded", step=step, tokens=0, world_size=1, files=files, versions={})
    )
    return final


def settings(directory: Path, name: str = "mine") -> None:
    record_launch(OpenedRun(directory, None, RunState(), False, Disk()), config_yaml=f"name: {name}\n", step=0)


def test_a_new_directory_is_made_and_locked(tmp_path: Path) -> None:
    with open_run(tmp_path / "a" / "run", resume="auto", name="mine") as opened:
        assert (opened.checkpoint, opened.state, opened.from_own) == (None, RunState(), False)
        with (
            pytest.raises(CheckpointError, match="is training here already"),
            open_run(opened.directory, resume="auto", name="mine"),
        ):
            pass


def test_the_own_newest_wins_over_a_path(tmp_path: Path) -> None:
    run_dir, other = tmp_path / "run", make(tmp_path / "other", 50)
    with open_run(run_dir, resume=str(other), name="mine") as opened:
        assert (opened.checkpoint, opened.state.step, opened.from_own) == (other, 50, False)
        settings(run_dir)
    make(run_dir, 52)
    with open_run(run_dir, resume=str(other), name="mine") as opened:
        assert (opened.checkpoint, opened.state.step, opened.from_own) == (run_dir / "checkpoint-52", 52, True)
    with open_run(tmp_path / "third", resume=str(tmp_path / "other"), name="mine") as opened:
        assert opened.checkpoint == other, "the newest below a directory"


def test_leftovers_go_and_the_link_is_mended(tmp_path: Path) -> None:
    make(tmp_path, 2)
    newest = make(tmp_path, 4)
    settings(tmp_path)
    (newest / RUN_STATE).write_text("damaged")
    (tmp_path / ".staging-checkpoint-6").mkdir()
    with open_run(tmp_path, resume="auto", name="mine") as opened:
        assert opened.state.step == 2
    assert not (tmp_path / ".staging-checkpoint-6").exists()
    assert (tmp_path / "latest").resolve() == tmp_path / "checkpoint-2"


def test_looking_only_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path, 2)
    settings(tmp_path)
    (tmp_path / ".staging-checkpoint-6").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    with open_run(tmp_path, resume="auto", name="mine", dry_run=True) as opened:
        assert opened.state.step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_launch_killed_before_it_wrote_its_settings_is_no_stranger(tmp_path: Path) -> None:
    make(tmp_path, 2)
    (tmp_path / ".lock").touch()
    with open_run(tmp_path, resume="auto", name="mine") as opened:
        assert opened.state.step == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("notes.txt", "is not empty", id="a-file"),
        pytest.param("checkpoint-5/model.safetensors", "holds checkpoints, but no", id="another-programs-checkpoint"),
    ],
)
def test_a_directory_of_others_is_left_alone(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / content
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    with pytest.raises(CheckpointError, match=message), open_run(tmp_path, resume="auto", name="mine"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == [content.partition("/")[0]]


def test_another_run_an_unknown_path_and_never_are_refused(tmp_path: Path) -> None:
    settings(tmp_path, "theirs")
    with (
        pytest.raises(CheckpointError, match="holds the run 'theirs', not 'mine'"),
        open_run(tmp_path, resume="auto", name="mine"),
    ):
        pass
    with (
        pytest.raises(CheckpointError, match="no such directory"),
        open_run(tmp_path / "new", resume=str(tmp_path / "nowhere"), name="mine"),
    ):
        pass
    make(tmp_path, 4)
    with (
        pytest.raises(CheckpointError, match=r"training\.resume is never"),
        open_run(tmp_path, resume="never", name="theirs"),
    ):
        pass


def test_what_changed_is_said_by_key(tmp_path: Path) -> None:
    record_launch(
        OpenedRun(tmp_path, None, RunState(), False, Disk()),
        config_yaml="name: mine\ntraining:\n  learning_rate: 0.1\n  bf16: true\n",
        step=0,
    )
    assert changed_settings(tmp_path, "name: mine\ntraining:\n  learning_rate: 0.2\n  bf16: true\n") == [
        "training.learning_rate was 0.1 and is now 0.2"
    ]


def test_damage_below_a_path_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = tmp_path / "other"
    whole, damaged = make(other, 50), make(other, 60)
    (damaged / RUN_STATE).write_text("damaged")
    with open_run(tmp_path / "run", resume=str(other), name="mine") as opened:
        assert opened.checkpoint == whole
    assert f"passed over: {damaged}: {RUN_STATE} has 7 bytes" in caplog.text
    (whole / RUN_STATE).unlink()
    with (
        pytest.raises(CheckpointError, match="none of the checkpoints there is whole"),
        open_run(tmp_path / "again", resume=str(other), name="mine"),
    ):
        pass


def test_damaged_copies_are_passed_over_for_what_is_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The newest that is whole counts, wherever it lies; with nothing whole anywhere nothing starts afresh."""
    url, run_dir, empty = f"file://{tmp_path}/store", tmp_path / "run", tmp_path / "empty"
    for step in (2, 4, 6):
        shutil.copytree(make(tmp_path / "written", step), tmp_path / "store" / f"checkpoint-{step}")
    (tmp_path / "store" / "checkpoint-6" / RUN_STATE).write_text("damaged")
    make(run_dir, 2)
    with open_run(run_dir, resume="auto", name="mine", upload_to=url) as opened:
        assert opened.state.step == 4
    assert "passed over" in caplog.text
    assert "checkpoint-6" in caplog.text
    for step in (2, 4):
        (tmp_path / "store" / f"checkpoint-{step}" / RUN_STATE).write_text("damaged")
    with open_run(run_dir, resume="auto", name="mine", upload_to=url) as opened:
        assert opened.state.step == 4, "it is here by now"
    with (
        pytest.raises(CheckpointError, match="none of the copies there is whole"),
        open_run(empty, resume="auto", name="mine", upload_to=url),
    ):
        pass
    assert commit.list_checkpoints(empty) == []


def test_numbers_with_leading_zeros_are_nobodys_checkpoints(tmp_path: Path) -> None:
    shutil.copytree(make(tmp_path, 2), tmp_path / "checkpoint-0099")
    settings(tmp_path)
    with open_run(tmp_path, resume="auto", name="mine") as opened:
        assert opened.state.step == 2
