"""Which checkpoint a run goes back to; the going back itself is in tests/crash/test_going_back.py."""

from pathlib import Path

from olmo_hf.training import commit
from olmo_hf.training.disk import Disk
from olmo_hf.training.going_back import checkpoint_before
from olmo_hf.training.settling import describe_files


def write_checkpoint(run_dir: Path, step: int, *, optimizer: bool = True) -> Path:
    """A checkpoint with one file in it."""
    staging = commit.staging_path(run_dir, step)
    staging.mkdir(parents=True)
    (staging / "model.safetensors").write_bytes(b"weights")
    manifest = commit.Manifest(
        kind="unsharded",
        step=step,
        tokens=0,
        world_size=1,
        files=describe_files(staging, ["model.safetensors"]),
        versions={},
        optimizer=optimizer,
    )
    commit.commit(staging, commit.checkpoint_path(run_dir, step), manifest)
    return commit.checkpoint_path(run_dir, step)


def test_the_newest_whole_one_of_an_earlier_step(tmp_path: Path) -> None:
    disk = Disk(is_writer=True)
    assert checkpoint_before(tmp_path, disk, 5) is None
    four, eight, ten = write_checkpoint(tmp_path, 4), write_checkpoint(tmp_path, 8), write_checkpoint(tmp_path, 10)
    write_checkpoint(tmp_path, 9, optimizer=False)
    assert checkpoint_before(tmp_path, disk, 11) == ten
    assert checkpoint_before(tmp_path, disk, 10) == eight, "from one without an optimizer nothing goes on"
    assert checkpoint_before(tmp_path, disk, 8) == four, "that of the spike itself would hold the spike"
    (eight / "model.safetensors").write_bytes(b"damaged")
    assert checkpoint_before(tmp_path, disk, 10) == four
    assert checkpoint_before(tmp_path, disk, 4) is None
