"""Copies in the stores that users have, by their own clients: put, tried again, replaced, read on an empty machine."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit, upload
from olmo_hf.training.upload import Uploader, fetch, fetch_source, newest_copy
from tests import hub_stub
from tests.training.object_stores import S3, Google
from tests.training.test_commit import make
from tests.training.test_upload import send


@pytest.fixture(params=["s3", "gs"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3 | Google]:
    """A store and its client, which knows nothing from before."""
    client = {"s3": "s3fs", "gs": "gcsfs"}[request.param]
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"needs {client}, of the extra `remote`")
    monkeypatch.setattr(upload, "FIRST_PAUSE_SECONDS", 0.01)
    server: S3 | Google = S3() if request.param == "s3" else Google()
    settings: dict[str, Any] = {"endpoint_url": server.url, "token": "anon"}
    if isinstance(server, S3):
        settings = {"endpoint_url": server.url, "key": "anybody", "secret": "anything"}
        settings["config_kwargs"] = {"retries": {"max_attempts": 1}}
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setitem(fsspec.config.conf, request.param, settings)
    files = fsspec.get_filesystem_class(request.param)
    files.clear_instance_cache()
    if isinstance(server, S3):
        fsspec.filesystem("s3").mkdir("bucket")
    yield server
    server.failures = 0
    if isinstance(server, S3):
        fsspec.filesystem("s3").rm("bucket", recursive=True)  # moto remembers for the whole process
    files.clear_instance_cache()
    server.close()


def address(store: S3 | Google) -> str:
    return "s3://bucket/team/run" if isinstance(store, S3) else "gs://bucket/team/run"


def test_there_and_back_again(store: S3 | Google, tmp_path: Path) -> None:
    url, run_dir, empty = address(store), tmp_path / "run", tmp_path / "empty"
    large = os.urandom(6 << 20)  # more than a client puts in one piece
    send(url, make(run_dir, 2, kind="ephemeral"), make(run_dir, 4), make(run_dir, 10, content=large))
    assert newest_copy(url) == 10
    found = fetch(url, 10, empty)
    assert commit.verify(found).files == commit.verify(run_dir / "checkpoint-10").files
    assert commit.newest_whole(empty) == (empty / "checkpoint-10", [])
    assert upload.Storage(url).steps() == [10, 4], "the ephemeral one gave way"
    assert fetch_source(f"{url}/checkpoint-4", tmp_path / "other").name == "checkpoint-4"
    with pytest.raises(CheckpointError, match="no checkpoint is there"):
        fetch_source(f"{url}-of-nobody", tmp_path / "other")


def test_the_manifest_comes_last_and_a_replaced_copy_is_never_half(store: S3 | Google, tmp_path: Path) -> None:
    url, run_dir = address(store), tmp_path / "run"
    send(url, make(run_dir, 4, content=b"old"))
    assert [name.rpartition("/")[2] for name in store.puts][-1] == commit.MANIFEST
    store.failures = 10_000
    uploader = Uploader(url)
    again = make(run_dir, 4, content=b"new")
    uploader.submit(again, commit.read_manifest(again))
    uploader.stop(timeout_seconds=60)
    store.failures = 0
    assert newest_copy(url) is None, "the manifest of the old one went first"
    send(url, again)
    assert (fetch(url, 4, tmp_path / "empty") / "model.safetensors").read_bytes() == b"new"


def test_a_store_in_trouble_is_asked_again(store: S3 | Google, tmp_path: Path) -> None:
    url = address(store)
    checkpoint = make(tmp_path / "run", 2)
    store.failures = 7 if isinstance(store, S3) else 5  # s3fs tries again by itself too
    send(url, checkpoint)
    assert store.failures == 0
    assert newest_copy(url) == 2


def test_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    client, url, run_dir = fsspec.get_filesystem_class("hf"), "hf://someone/runs/run", tmp_path / "run"
    with hub_stub.running() as hub:
        hub.repositories["someone/runs"] = hub_stub.Repository()
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": hub.url, "token": "hf_anything"})
        client.clear_instance_cache()
        assert newest_copy(url) is None, "a first launch finds no folder of the run yet"
        send(url, make(run_dir, 2, kind="ephemeral"), make(run_dir, 4, content=b"old"))
        send(url, make(run_dir, 4, content=b"new"))
        assert newest_copy(url) == 4
        assert (fetch(url, 4, tmp_path / "empty") / "model.safetensors").read_bytes() == b"new"
        assert {name.split("/")[1] for name in hub.repositories["someone/runs"].files} == {"checkpoint-4"}
        assert hub.unknown == []
        client.clear_instance_cache()
