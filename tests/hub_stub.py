"""A Hugging Face Hub on the loopback: enough of it to create a repository, upload a model and load it back.

Set in the environment before `huggingface_hub` is imported: `HF_ENDPOINT=<stub.url>`, `HF_TOKEN=...`,
`HF_HUB_DISABLE_XET=1` (the client's other upload protocol), `HF_HUB_OFFLINE` unset.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote


@dataclass
class Repository:
    """One repository with a single branch."""

    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        listing = sorted((path, hashlib.sha1(content).hexdigest()) for path, content in self.files.items())
        return hashlib.sha1(json.dumps(listing).encode()).hexdigest()


class HubStub(ThreadingHTTPServer):
    """Serves until the `with` block of `running` ends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.unknown: list[tuple[str, str]] = []
        self.tokens: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running() -> Iterator[HubStub]:
    stub = HubStub()
    thread = threading.Thread(target=stub.serve_forever, daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        stub.shutdown()
        stub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubStub

    def log_message(self, *_: Any) -> None:
        """Stay silent."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self, content: Any = None, status: int = 200, headers: dict[str, str] | None = None) -> None:
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def _missing(self, code: str, headers: dict[str, str] | None = None) -> None:
        self._answer({"error": code}, 404, {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def _serve(self) -> None:
        path, body = self.path.split("?")[0], self._body()
        self.server.requests.append((self.command, path))
        if token := self.headers.get("Authorization"):
            self.server.tokens.add(token.removeprefix("Bearer "))
        for pattern, action in _ROUTES:
            if match := re.fullmatch(pattern, path):
                action(self, body, *match.groups())
                return
        self.server.unknown.append((self.command, path))
        self._missing("EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _create(self, body: bytes) -> None:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
        status = 409 if name in self.server.repositories else 200
        self.server.repositories.setdefault(name, Repository())
        self._answer({"url": f"{self.server.url}/{name}", "name": name, "id": name}, status)

    def _who_am_i(self, _: bytes) -> None:
        self._answer({"type": "user", "name": "someone", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def _validate_yaml(self, _: bytes) -> None:
        self._answer({"errors": [], "warnings": []})

    def _preupload(self, body: bytes, _: str) -> None:
        files = json.loads(body)["files"]
        modes = [{"path": f["path"], "uploadMode": _upload_mode(f["path"]), "shouldIgnore": False} for f in files]
        self._answer({"files": modes})

    def _batch(self, body: bytes, _: str) -> None:
        objects = [
            {**o, "actions": {"upload": {"href": f"{self.server.url}/blobs/{o['oid']}", "header": {}}}}
            for o in json.loads(body)["objects"]
        ]
        self._answer({"transfer": "basic", "objects": objects})

    def _blob(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.blobs[oid] = body
        self._answer({})

    def _commit(self, body: bytes, name: str) -> None:
        repository = self.server.repositories[name]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repository.files[value["path"]] = self.server.blobs[value["oid"]]
            elif entry["key"] == "deletedFile":
                del repository.files[value["path"]]
            elif entry["key"] == "deletedFolder":
                start = value["path"].rstrip("/") + "/"
                repository.files = {p: c for p, c in repository.files.items() if not p.startswith(start)}
        url = f"{self.server.url}/{name}/commit/{repository.commit}"
        self._answer({"success": True, "commitOid": repository.commit, "commitUrl": url, "hookOutput": ""})

    def _information(self, _: bytes, name: str) -> None:
        repository = self.server.repositories.get(name)
        if repository is None:
            self._missing("RepoNotFound")
            return
        siblings = [{"rfilename": path} for path in repository.files]
        about = {"id": name, "modelId": name, "sha": repository.commit, "private": False, "siblings": siblings}
        self._answer(about | {"tags": [], "downloads": 0, "likes": 0})

    def _tree(self, _: bytes, name: str, folder: str | None) -> None:
        """Entries of a folder; all below it when asked for recursively."""
        start = f"{unquote(folder)}/" if folder else ""
        files = {p: c for p, c in self.server.repositories[name].files.items() if p.startswith(start)}
        if start and not files:
            self._missing("EntryNotFound")
            return
        deep = "recursive=true" in self.path.lower()
        entries = [_entry(p, c) for p, c in files.items() if deep or "/" not in p[len(start) :]]
        self._answer(
            [_folder(p) for p in sorted(_folders(files, start)) if deep or "/" not in p[len(start) :]] + entries
        )

    def _paths_info(self, body: bytes, name: str) -> None:
        files = self.server.repositories[name].files
        if self.headers.get("Content-Type", "").startswith("application/json"):
            asked = json.loads(body)["paths"]
        else:
            asked = parse_qs(body.decode())["paths"]
        found = [_entry(p, files[p]) for p in asked if p in files]
        self._answer(found + [_folder(p) for p in asked if p in _folders(files, "")])

    def _resolve(self, _: bytes, name: str, path: str) -> None:
        repository = self.server.repositories.get(name)
        if repository is None:
            self._missing("RepoNotFound")
        elif path not in repository.files:
            self._missing("EntryNotFound", {"X-Repo-Commit": repository.commit})
        else:
            content = repository.files[path]
            headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": repository.commit}
            self._answer(content, 200, {**headers, "Content-Type": "application/octet-stream"})


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": _etag(content)}


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest()}


def _folders(files: Iterable[str], start: str) -> set[str]:
    """All folders below `start` that hold one of the files."""
    found = {parent.as_posix() for path in files for parent in PurePosixPath(path).parents}
    return {folder for folder in found - {"."} if folder.startswith(start)}


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _upload_mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"


_NAME = r"([^/]+/[^/]+?)"
_ROUTES = (
    (r"/api/repos/create", _Handler._create),
    (r"/api/whoami-v2", _Handler._who_am_i),
    (r"/api/validate-yaml", _Handler._validate_yaml),
    (rf"/api/models/{_NAME}/preupload/[^/]+", _Handler._preupload),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler._batch),
    (r"/blobs/(\w+)", _Handler._blob),
    (rf"/api/models/{_NAME}/commit/[^/]+", _Handler._commit),
    (rf"/api/models/{_NAME}/tree/[^/]+(?:/(.+))?", _Handler._tree),
    (rf"/api/models/{_NAME}/paths-info/[^/]+", _Handler._paths_info),
    (rf"/api/models/{_NAME}(?:/revision/[^/]+)?", _Handler._information),
    (rf"/{_NAME}/resolve/[^/]+/(.+)", _Handler._resolve),
)
