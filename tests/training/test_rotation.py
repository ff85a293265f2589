"""What stays and what goes, by kind and by step."""

import os
import shutil
from pathlib import Path

import pytest

from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit
from olmo_hf.training.rotation import Keep, require_space, rotate
from tests.training.test_commit import make


def names(run_dir: Path) -> list[int]:
    return sorted(commit.step_of(path) for path in commit.list_checkpoints(run_dir))


def test_each_kind_is_counted_by_itself(tmp_path: Path) -> None:
    for step in range(1, 9):
        make(tmp_path, step, kind="sharded" if step % 2 else "unsharded")
    rotate(tmp_path, newest=tmp_path / "checkpoint-8", keep=Keep(sharded=1, unsharded=3))
    assert names(tmp_path) == [4, 6, 7, 8]


def test_ephemeral_ones_go_when_there_is_a_newer_one_to_go_on_from(tmp_path: Path) -> None:
    keep = Keep()
    first = make(tmp_path, 2, kind="ephemeral")
    rotate(tmp_path, newest=first, keep=keep)
    assert names(tmp_path) == [2]
    model_only = make(tmp_path, 3, optimizer=False)
    rotate(tmp_path, newest=model_only, keep=keep)
    assert names(tmp_path) == [2, 3], "nobody can go on from step 3"
    second = make(tmp_path, 4, kind="ephemeral")
    rotate(tmp_path, newest=second, keep=keep)
    assert names(tmp_path) == [3, 4]
    permanent = make(tmp_path, 5, kind="sharded")
    rotate(tmp_path, newest=permanent, keep=keep)
    assert names(tmp_path) == [3, 5]


def test_models_never_push_out_the_last_one_to_go_on_from(tmp_path: Path) -> None:
    make(tmp_path, 1)
    for step in (2, 3, 4):
        newest = make(tmp_path, step, optimizer=False)
        rotate(tmp_path, newest=newest, keep=Keep(unsharded=1))
    assert names(tmp_path) == [1, 4]


def test_what_is_in_use_unreadable_or_newer_is_left_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3, 5, 9):
        make(tmp_path, step)
    (tmp_path / "checkpoint-2" / commit.MANIFEST).write_text("damaged")
    rotate(tmp_path, newest=tmp_path / "checkpoint-5", keep=Keep(unsharded=1), protected=("checkpoint-3",))
    assert names(tmp_path) == [2, 3, 5, 9]


def test_what_cannot_be_removed_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 1)
    newest = make(tmp_path, 2)

    def busy(path: object, *arguments: object, **options: object) -> None:
        raise OSError(16, "device or resource busy", str(path))

    with monkeypatch.context() as changed:
        changed.setattr(os, "replace", busy)
        changed.setattr(shutil, "rmtree", busy)
        rotate(tmp_path, newest=newest, keep=Keep(unsharded=1))
    assert "checkpoint-1" in caplog.text
    assert names(tmp_path) == [1, 2]
    rotate(tmp_path, newest=newest, keep=Keep(unsharded=1))
    assert names(tmp_path) == [2]


def test_space_is_asked_for_before_anything_is_written(tmp_path: Path) -> None:
    require_space(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"needs 1,000,000,000,000,000,000 bytes but only [\d,]+ are free"):
        require_space(tmp_path, 10**18)
