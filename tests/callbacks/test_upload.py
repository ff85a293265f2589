"""The record of a run, copied while it goes on."""

import threading
import time
from pathlib import Path

import pytest

from olmo_hf.callbacks.args import CallbacksArgs, UploadArgs, callbacks_problems
from olmo_hf.callbacks.upload import Upload
from olmo_hf.errors import CheckpointError


def write_record(run_dir: Path) -> None:
    (run_dir / "data-indices").mkdir(parents=True)
    (run_dir / "checkpoint-4").mkdir()
    (run_dir / "metrics.jsonl").write_text("one\n")
    (run_dir / "data-indices" / "rank1.tsv.gz").write_bytes(b"\x1f\x8b")
    (run_dir / "checkpoint-4" / "model.safetensors").write_bytes(b"large")


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_what_changed_is_copied_and_checkpoints_are_not(tmp_path: Path) -> None:
    run_dir, there = tmp_path / "run", tmp_path / "there"
    write_record(run_dir)
    callback = Upload(UploadArgs(to=there.as_uri()), run_dir=run_dir)
    callback.copy_changed()
    assert files(there) == {"metrics.jsonl": b"one\n", "data-indices/rank1.tsv.gz": b"\x1f\x8b"}
    (there / "data-indices" / "rank1.tsv.gz").unlink()
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write("two\n")
    callback.copy_changed()
    assert files(there) == {"metrics.jsonl": b"one\ntwo\n"}, "what has not changed is not copied again"


def test_it_works_in_the_background_and_the_end_is_copied(tmp_path: Path, arguments, state, control) -> None:
    run_dir, there = tmp_path / "run", tmp_path / "there"
    write_record(run_dir)
    callback = Upload(UploadArgs(to=there.as_uri(), interval_seconds=0.02), run_dir=run_dir)
    callback.on_train_begin(arguments, state, control)
    deadline = time.monotonic() + 20
    while not (there / "metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (run_dir / "events.jsonl").write_text("the end\n")
    callback.on_train_end(arguments, state, control)
    assert (there / "events.jsonl").read_text() == "the end\n"
    assert not [thread for thread in threading.enumerate() if thread.name == "upload-record"]


def test_a_failing_storage_is_told_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir, there = tmp_path / "run", tmp_path / "there"
    write_record(run_dir)
    there.write_text("a file, where a directory should be")
    callback = Upload(UploadArgs(to=there.as_uri()), run_dir=run_dir)
    callback.copy_changed()
    callback.copy_changed()
    assert caplog.text.count("cannot be copied") == 1
    there.unlink()
    callback.copy_changed()
    assert (there / "metrics.jsonl").read_text() == "one\n"


def test_addresses_are_checked(tmp_path: Path) -> None:
    (problem,) = callbacks_problems(CallbacksArgs(upload=UploadArgs(to="somewhere")))
    assert problem.startswith("callbacks.upload.to is 'somewhere', but must be an address")
    with pytest.raises(CheckpointError, match="cannot be reached from here"):
        Upload(UploadArgs(to="nonsense://x"), run_dir=tmp_path)
