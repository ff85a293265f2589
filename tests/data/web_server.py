"""A web server on the loopback that behaves, or misbehaves as it is told."""

import hashlib
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

CONTENT = (np.arange(1_000) * 7 % 500).astype(np.uint16)


class Server(ThreadingHTTPServer):
    """Serves `files`; `faults` are used up one per ranged read: drop, delay, truncate, short, error, deny, shift."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/a.npy": CONTENT.tobytes()}
        self.faults: list[str] = []
        self.ranges = True
        self.conditions = True
        self.reads: list[tuple[str, str | None]] = []
        self.looks: list[str] = []

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _headers(self, status: int, length: int, etag: str, **more: str) -> None:
        self.send_response(status)
        for name, value in more.items():
            self.send_header(name.replace("_", "-"), value)
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
        self.server.looks.append(self.path)
        if (found := self._content()) is not None:
            self._headers(200, len(found[0]), found[1])

    def do_GET(self) -> None:
        if (found := self._content()) is None:
            return
        content, etag = found
        asked = self.headers.get("Range")
        self.server.reads.append((self.path, asked))
        if self.server.conditions and self.headers.get("If-Match", etag) != etag:
            return self._headers(412, 0, etag)
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "drop":
            self.close_connection = True
            return self.connection.close()
        if fault == "delay":
            time.sleep(0.6)
            self.close_connection = True
            return None
        if fault in ("error", "deny"):
            return self._headers(503 if fault == "error" else 403, 0, etag)
        more: dict[str, str] = {}
        if asked is not None and self.server.ranges:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            if fault == "shift":
                first, last = first + 2, last + 2
            more["Content_Range"] = f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        if fault == "short":
            content = content[: len(content) // 2]
        self._headers(206 if more else 200, len(content), etag, **more)
        if fault == "truncate":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return None
        self.wfile.write(content)
        return None
