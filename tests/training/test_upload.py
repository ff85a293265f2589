"""Copies elsewhere: whole or absent there too, patient, never in the way, and good for an empty machine."""

import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit, upload
from olmo_hf.training.upload import Uploader, fetch, fetch_source, newest_copy
from tests.training.test_commit import make


class Flaky(MemoryFileSystem):
    """A storage on loopback whose next requests fail, or whose puts take their time."""

    protocol = "flaky"
    store: dict[str, Any] = {}
    failures = 0
    delay_seconds = 0.0
    puts: list[str] = []

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        time.sleep(Flaky.delay_seconds)
        if Flaky.failures > 0:
            Flaky.failures -= 1
            raise ConnectionError("reset by peer")
        Flaky.puts.append(rpath)
        super().put_file(lpath, rpath, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "FIRST_PAUSE_SECONDS", 0.01)
    Flaky.store.clear()
    Flaky.pseudo_dirs[:] = [""]
    Flaky.failures, Flaky.delay_seconds, Flaky.puts = 0, 0.0, []


def send(url: str, *checkpoints: Path) -> None:
    uploader = Uploader(url)
    for checkpoint in checkpoints:
        uploader.submit(checkpoint, commit.read_manifest(checkpoint))
        while uploader.in_use:
            time.sleep(0.005)
    uploader.finish()


@pytest.mark.parametrize("protocol", ["flaky", "file"])
def test_there_and_back_again(tmp_path: Path, protocol: str) -> None:
    url = "flaky://bucket/run" if protocol == "flaky" else f"file://{tmp_path}/bucket/run"
    run_dir, empty = tmp_path / "run", tmp_path / "empty"
    send(url, make(run_dir, 2), make(run_dir, 10, content=b"ten"))
    assert newest_copy(url) == 10
    found = fetch(url, 10, empty)
    assert commit.verify(found).files == commit.verify(run_dir / "checkpoint-10").files
    assert commit.newest_whole(empty) == (empty / "checkpoint-10", [])
    assert not list(empty.glob(".staging*"))


def test_the_manifest_is_put_last(tmp_path: Path) -> None:
    send("flaky://bucket/run", make(tmp_path, 2))
    assert [path.rpartition("/")[2] for path in Flaky.puts][-1] == commit.MANIFEST
    assert len(Flaky.puts) == 3


def test_what_fails_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Flaky.failures = 4
    send("flaky://bucket/run", make(tmp_path, 2))
    assert newest_copy("flaky://bucket/run") == 2
    assert caplog.text.count("reset by peer; trying again") == 4


def test_what_cannot_be_copied_is_told_and_the_next_one_is_copied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Flaky.failures = upload.MAX_ATTEMPTS
    send("flaky://bucket/run", make(tmp_path, 2), make(tmp_path, 4))
    assert "checkpoint-2 was not copied" in caplog.text
    assert newest_copy("flaky://bucket/run") == 4
    with pytest.raises(CheckpointError, match="checkpoint-2"):
        fetch("flaky://bucket/run", 2, tmp_path / "other")


def test_training_never_waits(tmp_path: Path) -> None:
    Flaky.delay_seconds = 0.2
    uploader, checkpoint = Uploader("flaky://bucket/run"), make(tmp_path, 2)
    start = time.perf_counter()
    uploader.submit(checkpoint, commit.read_manifest(checkpoint))
    assert time.perf_counter() - start < 0.1
    assert uploader.in_use == ("checkpoint-2",), "rotation must leave it alone"
    uploader.finish()
    assert uploader.in_use == ()
    assert newest_copy("flaky://bucket/run") == 2


def test_ephemeral_copies_give_way(tmp_path: Path) -> None:
    url = "flaky://bucket/run"
    send(url, make(tmp_path, 2, kind="ephemeral"))
    assert newest_copy(url) == 2
    send(url, make(tmp_path, 3, optimizer=False))
    assert newest_copy(url) == 2, "the model alone is nothing to go on from"
    send(url, make(tmp_path, 4, kind="ephemeral"), make(tmp_path, 6))
    assert {path.rpartition("checkpoint-")[2][0] for path in Flaky.store} == {"3", "6"}


def test_an_ephemeral_one_that_is_overtaken_is_left_out(tmp_path: Path) -> None:
    Flaky.delay_seconds = 0.1
    uploader = Uploader("flaky://bucket/run")
    for checkpoint in (make(tmp_path, 2), make(tmp_path, 3, kind="ephemeral"), make(tmp_path, 4)):
        uploader.submit(checkpoint, commit.read_manifest(checkpoint))
    uploader.finish()
    assert not [path for path in Flaky.puts if "checkpoint-3" in path]
    assert newest_copy("flaky://bucket/run") == 4


def test_a_copy_cut_off_or_changed_is_not_taken(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    send(url, make(tmp_path / "run", 2), make(tmp_path / "run", 4), make(tmp_path / "run", 6))
    (tmp_path / "bucket" / "checkpoint-6" / commit.MANIFEST).unlink()
    assert newest_copy(url) == 4
    (tmp_path / "bucket" / "checkpoint-4" / "model.safetensors").write_bytes(b"x" * 5000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        fetch(url, 4, tmp_path / "other")
    assert commit.list_checkpoints(tmp_path / "other") == []


def test_damaged_copies_are_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"file://{tmp_path}/bucket"
    send(url, *(make(tmp_path / "run", step) for step in (2, 4, 6)))
    (tmp_path / "bucket" / "checkpoint-6" / "model.safetensors").write_bytes(b"x" * 5000)
    (tmp_path / "bucket" / "checkpoint-4" / "model.safetensors").unlink()
    assert fetch_source(url, tmp_path / "new").name == "checkpoint-2"
    assert "model.safetensors is damaged" in caplog.text
    assert "checkpoint-4: model.safetensors is missing" in caplog.text
    assert not list((tmp_path / "new" / upload.DOWNLOADED).glob(".staging*"))
    (tmp_path / "bucket" / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no whole checkpoint is there"):
        fetch_source(url, tmp_path / "newer")


def test_a_manifest_cannot_write_elsewhere(tmp_path: Path) -> None:
    """Whoever may write to the storage may not write to the machine that reads it."""
    url = f"file://{tmp_path}/bucket"
    checkpoint = make(tmp_path / "run", 2)
    send(url, checkpoint)
    manifest = commit.read_manifest(checkpoint)
    manifest.files["../../victim"] = manifest.files["model.safetensors"]
    commit.write_manifest(tmp_path / "bucket" / "checkpoint-2", manifest)
    (tmp_path / "victim").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match=r"lists '\.\./\.\./victim', which is not inside the checkpoint"):
        fetch(url, 2, tmp_path / "new" / "run")
    assert newest_copy(url) is None
    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert not (tmp_path / "new" / "victim").exists()


def test_a_run_may_start_from_an_address(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket"
    send(url, make(tmp_path / "run", 2), make(tmp_path / "run", 4))
    assert fetch_source(url, tmp_path / "new").name == "checkpoint-4"
    assert fetch_source(f"{url}/checkpoint-2", tmp_path / "new").name == "checkpoint-2"
    assert commit.list_checkpoints(tmp_path / "new") == [], "it is not the new run's own"
    with pytest.raises(CheckpointError, match="no checkpoint is there"):
        fetch_source(f"file://{tmp_path}/nothing", tmp_path / "new")


def test_an_address_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot be reached from here"):
        Uploader("unheard-of://bucket/run")


def test_giving_up_takes_no_longer_than_asked(tmp_path: Path) -> None:
    Flaky.failures = 1000
    uploader, checkpoint = Uploader("flaky://bucket/run"), make(tmp_path, 2)
    uploader.submit(checkpoint, commit.read_manifest(checkpoint))
    threading.Event().wait(0.05)
    uploader.stop(timeout_seconds=30)
    assert uploader.in_use == ()
