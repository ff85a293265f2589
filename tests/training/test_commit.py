"""A checkpoint is whole or absent: what damage does, what is passed over, what dead saves leave."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit, rotation
from olmo_hf.training.commit import Kind, Manifest
from olmo_hf.training.settling import describe_files

WEIGHTS = "model.safetensors"


def make(
    run_dir: Path, step: int, *, kind: Kind = "unsharded", optimizer: bool = True, content: bytes = b"w" * 5000
) -> Path:
    """A committed checkpoint with two files."""
    staging = commit.staging_path(run_dir, step)
    (staging / "sharded").mkdir(parents=True)
    (staging / WEIGHTS).write_bytes(content)
    (staging / "sharded" / "__1_0.distcp").write_bytes(b"rank 1")
    files = describe_files(staging, [WEIGHTS, "sharded/__1_0.distcp"])
    manifest = Manifest(kind=kind, step=step, tokens=step, world_size=1, files=files, versions={}, optimizer=optimizer)
    final = commit.checkpoint_path(run_dir, step)
    commit.commit(staging, final, manifest)
    return final


def cut(path: Path) -> None:
    os.truncate(path / WEIGHTS, 4900)


def flip(name: str, place: int) -> Callable[[Path], None]:
    def action(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[place] ^= 1
        (path / name).write_bytes(content)

    return action


def flip_the_step(path: Path) -> None:
    text = (path / commit.MANIFEST).read_text()
    (path / commit.MANIFEST).write_text(text.replace('"tokens": 8', '"tokens": 9'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(cut, "has 4900 bytes instead of 5000", id="truncated"),
        pytest.param(flip(WEIGHTS, 2500), f"{WEIGHTS} is damaged", id="flipped-bit-in-weights"),
        pytest.param(flip_the_step, "manifest.json is damaged", id="another-number-in-the-manifest"),
        pytest.param(flip(commit.MANIFEST, 0), "manifest.json is missing or unreadable", id="manifest-no-json"),
        pytest.param(
            lambda p: (p / "sharded" / "__1_0.distcp").unlink(), "__1_0.distcp is missing", id="missing-rank"
        ),
        pytest.param(lambda p: (p / commit.MANIFEST).unlink(), "manifest.json is missing", id="no-manifest"),
        pytest.param(lambda p: (p / commit.MANIFEST).write_bytes(b""), "missing or unreadable", id="empty-manifest"),
        pytest.param(lambda p: (p / commit.MANIFEST).write_text("{}"), "missing or unreadable", id="other-json"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    make(tmp_path, 4)
    newest = make(tmp_path, 8)
    assert commit.newest_whole(tmp_path) == (newest, [])
    damage(newest)
    found, passed_over = commit.newest_whole(tmp_path)
    assert found == tmp_path / "checkpoint-4"
    assert len(passed_over) == 1
    assert "checkpoint-8" in passed_over[0]
    assert reason in passed_over[0]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"files": {"model": {"size": 1}}, "step": 8}',
        '{"files": {"model": {"size": "1"}}, "step": 8}',
        "[]",
    ],
    ids=["deep", "no checksum", "size as text", "a list"],
)
def test_what_is_no_manifest_is_passed_over_with_its_name(tmp_path: Path, text: str) -> None:
    older, newer = make(tmp_path, 4, content=b"w"), make(tmp_path, 8, content=b"w")
    fields = json.loads((newer / commit.MANIFEST).read_text())
    if text.startswith("{"):  # all else as it should be, but for the manifest's own checksum
        text = json.dumps(fields | json.loads(text) | {"xxh3_128": ""})
    (newer / commit.MANIFEST).write_text(text)
    found, passed_over = commit.newest_whole(tmp_path)
    assert found == older
    assert [commit.MANIFEST in reason and "checkpoint-8" in reason for reason in passed_over] == [True]


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    """No single flipped bit goes unnoticed, except where it changes nothing but white space."""
    checkpoint = make(tmp_path, 8, content=b"w")
    original = (checkpoint / commit.MANIFEST).read_bytes()
    for place in range(len(original)):
        changed = bytearray(original)
        changed[place] ^= 1 << (place % 8)
        (checkpoint / commit.MANIFEST).write_bytes(changed)
        try:
            commit.verify(checkpoint)
        except CheckpointError:
            continue
        assert json.loads(changed) == json.loads(original), f"bit {place % 8} of byte {place}"


def test_stray_files_and_empty_directories_do_not_count(tmp_path: Path) -> None:
    whole = make(tmp_path, 4)
    (tmp_path / "checkpoint-99").write_text("a file")
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "checkpoint-7.tmp").mkdir()
    found, passed_over = commit.newest_whole(tmp_path)
    assert found == whole
    assert len(passed_over) == 1


def test_a_renamed_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """Its step would be counted twice, and steps written to come would be taken for older than it."""
    make(tmp_path, 4)
    make(tmp_path, 8).rename(tmp_path / "checkpoint-9")
    found, passed_over = commit.newest_whole(tmp_path)
    assert found == tmp_path / "checkpoint-4"
    assert passed_over == [f"{tmp_path}/checkpoint-9: holds step 8; a checkpoint must keep the name it was given"]


def test_a_checkpoint_moved_to_another_disk_is_rotated_by_its_link(tmp_path: Path) -> None:
    moved = make(tmp_path / "run", 4).rename(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoint-4").symlink_to(moved)
    newest = make(tmp_path / "run", 8)
    assert commit.newest_whole(tmp_path / "run", up_to_step=5)[0] == tmp_path / "run" / "checkpoint-4"
    rotation.rotate(tmp_path / "run", newest=newest, keep=rotation.Keep(unsharded=1))
    assert [path.name for path in commit.list_checkpoints(tmp_path / "run")] == ["checkpoint-8"]
    assert (moved / WEIGHTS).is_file()
    assert not list((tmp_path / "run").glob(".trash*"))


def test_the_step_decides_and_not_the_clock(tmp_path: Path) -> None:
    for step, seconds in ((9, 100), (10, 50), (2, 1_000_000_000)):
        os.utime(make(tmp_path, step), (seconds, seconds))
    assert [path.name for path in commit.list_checkpoints(tmp_path)] == [
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-2",
    ]
    rotation.rotate(tmp_path, newest=tmp_path / "checkpoint-10", keep=rotation.Keep(unsharded=2))
    assert {path.name for path in commit.list_checkpoints(tmp_path)} == {"checkpoint-10", "checkpoint-9"}


def test_latest_may_be_stale_or_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 4)

    def no_links(*arguments: object, **options: object) -> None:
        raise PermissionError("no links on this file system")

    with monkeypatch.context() as changed:
        changed.setattr(os, "symlink", no_links)
        changed.setattr(os, "link", no_links)
        newest = make(tmp_path, 8)
    assert (tmp_path / "latest").resolve().name == "checkpoint-4", "stale now"
    assert "no links on this file system" in caplog.text
    assert commit.newest_whole(tmp_path)[0] == newest
    commit.point_latest_to(newest)
    assert os.readlink(tmp_path / "latest") == "checkpoint-8", "relative: the directory may be moved"


def test_a_copy_that_followed_the_link_makes_room_and_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As `cp -rL` and object stores leave it: it would be taken for the newest for ever."""
    for step in (4, 8):
        make(tmp_path, step)
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").mkdir()
        (tmp_path / "latest" / "of").write_text(str(step))
    make(tmp_path, 12)
    assert os.readlink(tmp_path / "latest") == "checkpoint-12"
    assert [(tmp_path / f"latest-copy-{n}" / "of").read_text() for n in (1, 2)] == ["4", "8"]
    assert "was no link but a directory, and is now latest-copy-1" in caplog.text


def test_a_checkpoint_of_the_same_step_is_replaced_as_a_whole(tmp_path: Path) -> None:
    make(tmp_path, 4, content=b"old")
    make(tmp_path, 4, content=b"new")
    assert (tmp_path / "checkpoint-4" / WEIGHTS).read_bytes() == b"new"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_kill_between_the_two_renames_costs_nothing(tmp_path: Path) -> None:
    old = make(tmp_path, 4, content=b"old")
    os.replace(old, tmp_path / f"{commit.REPLACED_PREFIX}checkpoint-4")
    (tmp_path / ".staging-checkpoint-4").mkdir()
    (tmp_path / ".trash-checkpoint-2").mkdir()
    rotation.clean_leftovers(tmp_path)
    assert (old / WEIGHTS).read_bytes() == b"old"
    assert not list(tmp_path.glob(".[srt]*"))


def test_a_model_without_optimizer_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    make(tmp_path, 4)
    make(tmp_path, 6, optimizer=False)
    assert commit.newest_whole(tmp_path) == (tmp_path / "checkpoint-4", [])
    assert commit.newest_whole(tmp_path, up_to_step=3) == (None, [])
