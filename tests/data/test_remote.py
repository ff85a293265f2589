"""Remote token files, over a loopback server that behaves and misbehaves."""

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from olmo_hf.data import remote
from olmo_hf.data.args import DataArgs
from olmo_hf.data.checks import check_data, resolve_files
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.remote import describe_remote, fetch, read_remote
from olmo_hf.data.token_checks import TokenLimits
from olmo_hf.data.token_files import expand_paths
from olmo_hf.errors import DataError

CONTENT = (np.arange(1_000) * 7 % 500).astype(np.uint16)


class Server(ThreadingHTTPServer):
    """Serves `files`; `faults` are used up one per ranged read: drop, truncate, error or deny."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/a.npy": CONTENT.tobytes()}
        self.faults: list[str] = []
        self.ranges = True
        self.reads: list[tuple[str, str | None]] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _headers(self, status: int, length: int, etag: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", etag)
        self.end_headers()

    def _content(self) -> tuple[bytes, str] | None:
        content = self.server.files.get(self.path)
        if content is None:
            self._headers(404, 0, '""')
            return None
        return content, f'"{hashlib.md5(content).hexdigest()}"'

    def do_HEAD(self) -> None:
        if (found := self._content()) is not None:
            self._headers(200, len(found[0]), found[1])

    def do_GET(self) -> None:
        if (found := self._content()) is None:
            return
        content, etag = found
        asked = self.headers.get("Range")
        self.server.reads.append((self.path, asked))
        if self.headers.get("If-Match", etag) != etag:
            return self._headers(412, 0, etag)
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "drop":
            self.close_connection = True
            return self.connection.close()
        if fault in ("error", "deny"):
            return self._headers(503 if fault == "error" else 403, 0, etag)
        if asked is not None and self.server.ranges:
            first, last = asked.removeprefix("bytes=").split("-")
            content = content[int(first) : int(last) + 1]
        if fault == "short":
            content = content[: len(content) // 2]
        self._headers(206 if asked else 200, len(content), etag)
        if fault == "truncate":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return None
        self.wfile.write(content)
        return None


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.001)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def dataset(*urls: str, **options) -> MemMapDataset:
    return MemMapDataset(urls, sequence_length=10, token_dtype="uint16", **options)


def test_instances_are_read_in_exact_pieces(server: Server) -> None:
    server.files["/mask.bool"] = bytes([1, 0] * 500)
    data = dataset(server.url("/a.npy"), label_mask_paths=[server.url("/mask.bool")])
    server.reads.clear()
    assert data[7]["input_ids"].tolist() == CONTENT[70:80].tolist()
    assert data[7]["label_mask"].tolist() == [True, False] * 5
    assert server.reads[0] == ("/a.npy", "bytes=140-159")
    assert len(data) == 100
    assert data.locate(7).path == server.url("/a.npy")


@pytest.mark.parametrize("fault", ["drop", "truncate", "short", "error"])
def test_what_may_pass_is_tried_again(server: Server, fault: str) -> None:
    data = dataset(server.url("/a.npy"))
    server.faults = [fault] * (remote.MAX_ATTEMPTS - 1)
    assert data[99]["input_ids"].tolist() == CONTENT[990:].tolist()
    server.faults = [fault] * 100
    server.reads.clear()
    with pytest.raises(DataError, match=r"a\.npy: bytes 1,980 to 2,000 cannot be read in 6 attempts"):
        data[99]
    # aiohttp itself repeats a request once when a kept connection was closed.
    assert remote.MAX_ATTEMPTS <= len(server.reads) <= 2 * remote.MAX_ATTEMPTS


def test_what_will_not_pass_is_not(server: Server) -> None:
    data = dataset(server.url("/a.npy"))
    server.faults = ["deny"] * 5
    server.reads.clear()
    with pytest.raises(DataError, match=r"bytes 0 to 20 cannot be read \(403"):
        data[0]
    assert len(server.reads) == 1
    with pytest.raises(DataError, match=r"gone\.npy: size cannot be read \("):
        dataset(server.url("/gone.npy"))


def test_pauses_grow(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.5)
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    server.faults = ["error"] * 3
    assert read_remote(server.url("/a.npy"), 0, 4) == CONTENT[:2].tobytes()
    assert pauses == [0.5, 1.0, 2.0]


def test_a_changed_file_is_noticed(server: Server) -> None:
    data = dataset(server.url("/a.npy"))
    data[0]
    # In the middle of a run, by the server itself.
    server.files["/a.npy"] = (CONTENT + 1).tobytes()
    with pytest.raises(DataError, match=r"a\.npy: was changed while in use"):
        data[0]
    # By a process that begins to read later.
    fresh = dataset(server.url("/a.npy"))
    server.files["/a.npy"] = CONTENT[:-1].tobytes()
    with pytest.raises(DataError, match=r"a\.npy: was changed since the start"):
        fresh[0]


def test_a_server_without_ranges_is_named(server: Server, tmp_path: Path) -> None:
    server.files["/a.npy"] = np.zeros(10_000, np.uint16).tobytes()
    server.ranges = False
    with pytest.raises(DataError, match=r"sends the whole file \(20,000 bytes\), not the 4,096 asked for"):
        dataset(server.url("/a.npy"))


def test_workers(server: Server) -> None:
    data = dataset(server.url("/a.npy"))
    data[0]
    loader = DataLoader(data, batch_size=25, num_workers=2)
    assert np.concatenate([b["input_ids"].flatten() for b in loader]).tolist() == CONTENT.tolist()


def test_an_error_in_a_worker_names_the_file(server: Server) -> None:
    data = dataset(server.url("/a.npy"))
    server.faults = ["deny"] * 100
    with pytest.raises(DataError, match=r"a\.npy: bytes 0 to 20 cannot be read"):
        list(DataLoader(data, batch_size=25, num_workers=1))


def test_checks_and_headers(server: Server, tmp_path: Path) -> None:
    np.save(tmp_path / "h.npy", CONTENT)
    server.files["/h.npy"] = (tmp_path / "h.npy").read_bytes()
    args = DataArgs(paths=(server.url("/a.npy"), server.url("/h.npy")), token_dtype="uint16", sequence_length=10)
    assert check_data(args, limits=TokenLimits(vocab_size=500)) == []
    problems = check_data(args, limits=TokenLimits(vocab_size=400))
    assert len(problems) == 2
    assert "token 58 is id 406" in problems[0]
    assert dataset(server.url("/h.npy"))[3]["input_ids"].tolist() == CONTENT[30:40].tolist()


def test_the_cache(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FETCH_BYTES", 700)
    url = server.url("/a.npy")
    server.faults = ["drop", "", "truncate"]
    first = fetch(url, str(tmp_path))
    assert Path(first).read_bytes() == CONTENT.tobytes()
    server.reads.clear()
    assert fetch(url, str(tmp_path)) == first
    assert server.reads == []
    server.files["/a.npy"] = (CONTENT + 1).tobytes()
    second = fetch(url, str(tmp_path))
    assert second != first
    assert Path(second).read_bytes() == (CONTENT + 1).tobytes()
    # A copy that was cut off is continued.
    Path(second).rename(Path(second).with_name(f".{Path(second).name}.part"))
    with open(Path(second).with_name(f".{Path(second).name}.part"), "r+b") as stream:
        stream.truncate(1_900)
    server.reads.clear()
    assert Path(fetch(url, str(tmp_path))).read_bytes() == (CONTENT + 1).tobytes()
    assert [asked for _, asked in server.reads] == ["bytes=1900-1999"]
    args = DataArgs(paths=(url,), token_dtype="uint16", sequence_length=10, cache_dir=str(tmp_path))
    assert resolve_files(args).paths == [second]


def test_a_query_is_no_glob(server: Server) -> None:
    assert expand_paths(["https://example.org/a.npy?token=x*"]) == ["https://example.org/a.npy?token=x*"]
    assert describe_remote(server.url("/a.npy"))[0] == 2_000


def test_an_unknown_protocol_is_named() -> None:
    with pytest.raises(DataError, match=r"nowhere://x: cannot be read here"):
        describe_remote("nowhere://x")


def test_globs_over_a_protocol() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name in ("b", "a"):
        memory.pipe(f"/tokens/{name}.npy", CONTENT.tobytes())
    paths = expand_paths(["memory://tokens/*.npy"])
    assert paths == ["memory:///tokens/a.npy", "memory:///tokens/b.npy"]
    assert dataset(*paths)[100]["input_ids"].tolist() == CONTENT[:10].tolist()
    with pytest.raises(DataError, match="matches no file"):
        expand_paths(["memory://tokens/*.bin"])


def test_datasets_streams_remote_files(server: Server) -> None:
    import datasets

    from olmo_hf.data.hf_builder import register_dataset_builder

    register_dataset_builder()
    stream = datasets.load_dataset(
        "olmo_memmap",
        data_files={"train": [server.url("/a.npy")]},
        sequence_length=10,
        token_dtype="uint16",
        streaming=True,
    )["train"]
    assert np.concatenate([row["input_ids"] for row in stream]).tolist() == CONTENT.tolist()
