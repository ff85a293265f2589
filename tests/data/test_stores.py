"""Token files in object stores: S3 (a server of its own), the Hub and Google's (a few answers of theirs)."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
import numpy as np
import pytest
from torch.utils.data import DataLoader
from werkzeug.serving import make_server

from olmo_hf.data import remote
from olmo_hf.data.args import DataArgs
from olmo_hf.data.checks import check_data
from olmo_hf.data.manifest import FORMAT, VERSION
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.path_patterns import expand_paths
from olmo_hf.data.remote import fetch
from olmo_hf.data.token_checks import TokenLimits
from olmo_hf.errors import DataError

CONTENT = (np.arange(1_000) * 7 % 500).astype(np.uint16)


class FaultyS3:
    """moto's S3, with faults that are used up one per read of an object: error, truncate."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self.application = DomainDispatcherApplication(create_backend_app)
        self.faults: list[str] = []
        self.reads: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        asked = environ.get("HTTP_RANGE")
        if environ["REQUEST_METHOD"] != "GET" or asked is None:
            return self.application(environ, start_response)
        self.reads.append(asked)
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "error":
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        answer = self.application(environ, start_response)
        if fault == "truncate":
            return [b"".join(answer)[:7]]
        return answer


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyS3]:
    application = FaultyS3()
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.001)
    files = _filesystem("s3")
    files.mkdir("bucket")
    for name in ("b", "a"):
        files.pipe(f"bucket/tokens/{name}.npy", CONTENT.tobytes())
    yield application
    files.rm("bucket", recursive=True)
    _filesystem("s3")
    server.shutdown()
    thread.join()


def _filesystem(protocol: str) -> Any:
    """A file system that knows nothing from before."""
    fsspec.get_filesystem_class(protocol).clear_instance_cache()
    return fsspec.filesystem(protocol)


def dataset(*paths: str, **options: Any) -> MemMapDataset:
    return MemMapDataset(paths, sequence_length=10, token_dtype="uint16", **options)


def rows(data: Iterable[dict[str, Any]]) -> list[list[int]]:
    return [item["input_ids"].tolist() for item in data]


EXPECTED = CONTENT.reshape(-1, 10).tolist()


def test_s3_in_exact_pieces(s3: FaultyS3) -> None:
    paths = expand_paths(["s3://bucket/tokens/*.npy"])
    assert paths == ["s3://bucket/tokens/a.npy", "s3://bucket/tokens/b.npy"]
    _filesystem("s3").pipe("bucket/mask.bool", bytes([1, 0] * 500))
    data = dataset(*paths, label_mask_paths=["s3://bucket/mask.bool"] * 2)
    assert rows(data[i] for i in range(200)) == EXPECTED * 2
    assert data[0]["label_mask"].tolist() == [True, False] * 5
    assert "bytes=60-79" in s3.reads
    with pytest.raises(DataError, match=r"s3://bucket/tokens/\*\.bin: matches no file"):
        expand_paths(["s3://bucket/tokens/*.bin"])


@pytest.mark.parametrize("fault", ["error", "truncate"])
def test_s3_in_trouble_is_tried_again(s3: FaultyS3, fault: str) -> None:
    data = dataset("s3://bucket/tokens/a.npy")
    s3.faults = [fault, fault]
    assert rows([data[3]]) == [EXPECTED[3]]
    assert s3.faults == []


def test_what_s3_refuses_is_named_at_once(s3: FaultyS3) -> None:
    with pytest.raises(DataError, match=r"s3://bucket/gone\.npy: size cannot be read"):
        dataset("s3://bucket/gone.npy")
    with pytest.raises(DataError, match=r"s3://elsewhere/a\.npy: size cannot be read"):
        dataset("s3://elsewhere/a.npy")


def test_a_changed_object_is_refused_by_s3_itself(s3: FaultyS3) -> None:
    data = dataset("s3://bucket/tokens/a.npy")
    assert rows([data[0]]) == [EXPECTED[0]]
    # The same size: only the mark of the content tells.
    _filesystem("s3").pipe("bucket/tokens/a.npy", (CONTENT + 1).tobytes())
    with pytest.raises(DataError, match=r"tokens/a\.npy: was changed while in use"):
        data[1]


def test_workers_read_s3(s3: FaultyS3) -> None:
    data = dataset("s3://bucket/tokens/a.npy")
    data[0]  # the parent has connections, which a fork must not use
    loader = DataLoader(data, batch_size=25, num_workers=2, multiprocessing_context="fork")
    assert [row for batch in loader for row in batch["input_ids"].tolist()] == EXPECTED


def test_s3_manifest_and_cache(s3: FaultyS3, tmp_path: Path) -> None:
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "token_dtype": "uint16",
        "vocab_size": 500,
        "eos_token_id": 0,
        "pad_token_id": None,
        "tokenizer": "../tokenizer",
        "tokenizer_sha256": "",
        "num_documents": 1,
        "num_tokens": 1_000,
        "files": [
            {
                "path": "a.npy",
                "num_tokens": 1_000,
                "num_documents": 1,
                "size_bytes": 2_000,
                "sha256": hashlib.sha256(CONTENT.tobytes()).hexdigest(),
            }
        ],
    }
    _filesystem("s3").pipe("bucket/tokens/manifest.json", json.dumps(manifest).encode())
    section = DataArgs(paths=("s3://bucket/tokens/a.npy",), sequence_length=10, check="full")
    assert check_data(section, limits=TokenLimits(vocab_size=500)) == []
    s3.faults = ["truncate"]
    assert Path(fetch(section.paths[0], str(tmp_path))).read_bytes() == CONTENT.tobytes()


class Loopback(ThreadingHTTPServer):
    """Serves what a handler says."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.content = CONTENT.tobytes()
        self.reads: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Store(BaseHTTPRequestHandler):
    """What the two stores have in common."""

    protocol_version = "HTTP/1.1"
    server: Loopback

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def piece(self) -> None:
        asked = self.headers["Range"]
        self.server.reads.append(asked)
        first, last = asked.removeprefix("bytes=").split("-")
        self.answer(self.server.content[int(first) : int(last) + 1], 206)

    @property
    def mark(self) -> str:
        return hashlib.sha1(self.server.content).hexdigest()


class Hub(Store):
    """A data set on the Hub with the single file `a.npy`."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer([{"type": "file", "path": "a.npy", "size": len(self.server.content), "oid": self.mark}])

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self.piece()
        elif "/tree/" in self.path:
            self.answer([{"type": "file", "path": "a.npy", "size": len(self.server.content), "oid": self.mark}])
        else:
            self.answer({"id": "someone/tokens", "sha": "0" * 40, "private": False, "tags": [], "siblings": []})


class Google(Store):
    """A bucket of Google's with the single object `a.npy`."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if not unquote(path).endswith("/o/a.npy"):
            self.answer({"error": {"code": 404, "message": "none"}}, 404)
        elif "alt=media" in query:
            self.piece()
        else:
            size = str(len(self.server.content))
            about = {"name": "a.npy", "bucket": "bucket", "size": size, "generation": "1", "etag": self.mark}
            self.answer(about, Content_Type="application/json")


@pytest.fixture
def serve() -> Iterator[Callable[[type[Store]], Loopback]]:
    servers: list[Loopback] = []

    def start(handler: type[Store]) -> Loopback:
        server = Loopback(handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def reads_exactly(path: str, server: Loopback) -> None:
    """Instances come in the pieces that were asked for, and a changed file is noticed by the next process."""
    data = dataset(path)
    server.reads.clear()
    assert rows([data[3], data[99]]) == [EXPECTED[3], EXPECTED[99]]
    assert server.reads == ["bytes=60-79", "bytes=1980-1999"]
    before = data._files
    server.content = (CONTENT + 1).tobytes()
    data = dataset(path)
    data._files = before
    with pytest.raises(DataError, match=r"a\.npy: was changed since the start"):
        data[0]


def test_the_hub(serve: Callable[[type[Store]], Loopback], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    server = serve(Hub)
    monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.url})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    _filesystem("hf")
    try:
        reads_exactly("hf://datasets/someone/tokens/a.npy", server)
    finally:
        fsspec.get_filesystem_class("hf").clear_instance_cache()


def test_google(serve: Callable[[type[Store]], Loopback], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(Google)
    # Asking Google what kind of bucket it is would take minutes where there is no network.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setitem(fsspec.config.conf, "gs", {"endpoint_url": server.url, "token": "anon"})
    _filesystem("gs")
    try:
        reads_exactly("gs://bucket/a.npy", server)
    finally:
        fsspec.get_filesystem_class("gs").clear_instance_cache()
