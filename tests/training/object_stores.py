"""Object stores on the loopback, for copies of checkpoints: S3 by moto, and as much of Google's as gcsfs asks for."""

import json
import re
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class S3:
    """moto's S3; the next `failures` requests to put or to read an object are answered with 503."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.application = DomainDispatcherApplication(create_backend_app)
        self.failures = 0
        self.puts: list[str] = []
        self.server = make_server("127.0.0.1", 0, self, threaded=True)
        self.url = f"http://127.0.0.1:{self.server.port}"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.count("/") > 1 and method in ("PUT", "GET") and self.failures > 0:
            self.failures -= 1
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if method == "PUT":
            self.puts.append(path)
        return self.application(environ, start_response)

    def close(self) -> None:
        """Stop serving."""
        self.server.shutdown()
        self._thread.join()


class Google(ThreadingHTTPServer):
    """Buckets of Google's: upload in one piece or several, list, read, delete.

    The next `failures` uploads are refused, in a way after which the client does not try again by itself.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Google)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, bytes] = {}
        self.failures = 0
        self.puts: list[str] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()


class _Google(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Google

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""

    def _answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header(
            "Content-Type", "application/octet-stream" if isinstance(content, bytes) else "application/json"
        )
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _about(self, name: str) -> dict[str, Any]:
        size = str(len(self.server.objects[name]))
        return {"name": name, "bucket": "bucket", "size": size, "generation": "1", "updated": "2026-01-01T00:00:00Z"}

    def _store(self, name: str, content: bytes) -> None:
        self.server.objects[name] = content
        self.server.puts.append(name)
        self._answer(self._about(name))

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if self.server.failures > 0 and parts.path.startswith("/upload/"):
            self.server.failures -= 1
            self._answer({"error": {"code": 400, "message": "not now"}}, 400)
        elif parts.path.startswith("/upload/"):
            self._upload(body, query)
        elif (found := re.search(r"/o/(.+)$", parts.path)) is not None:
            self._object(unquote(found[1]), query)
        elif parts.path.endswith("/o"):
            self._list(query)
        else:
            self._answer({"name": "bucket", "kind": "storage#bucket"})

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve

    def _upload(self, body: bytes, query: dict[str, str]) -> None:
        if query.get("uploadType") == "multipart":
            boundary = re.search(r'boundary="?=*([^";]+?)=*"?$', self.headers["Content-Type"])
            assert boundary is not None, self.headers["Content-Type"]
            _, about, content, _ = re.split(rb"--=*" + re.escape(boundary[1].encode()) + rb"=*(?:--)?", body)
            name = json.loads(about.partition(b"\n\n")[2] or about.partition(b"\r\n\r\n")[2])["name"]
            self._store(name, re.split(rb"\r?\n\r?\n", content, maxsplit=1)[1].removesuffix(b"\n").removesuffix(b"\r"))
        elif "upload_id" not in query:
            name = query.get("name") or json.loads(body)["name"]
            self.server.uploads[name] = b""
            self._answer({}, Location=f"{self.server.url}{self.path}&upload_id={name}")
        else:
            name = query["upload_id"]
            self.server.uploads[name] += body
            if self.headers["Content-Range"].endswith("/*"):
                self._answer(b"", 308, Range=f"bytes=0-{len(self.server.uploads[name]) - 1}")
            else:
                self._store(name, self.server.uploads.pop(name))

    def _object(self, name: str, query: dict[str, str]) -> None:
        if name not in self.server.objects:
            self._answer({"error": {"code": 404, "message": "none"}}, 404)
        elif self.command == "DELETE":
            del self.server.objects[name]
            self._answer(b"", 204)
        elif query.get("alt") == "media":
            self._answer(self.server.objects[name])
        else:
            self._answer(self._about(name))

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names = sorted(name for name in self.server.objects if name.startswith(prefix))
        folders = sorted({prefix + n[len(prefix) :].partition("/")[0] + "/" for n in names if "/" in n[len(prefix) :]})
        items = [n for n in names if not delimiter or delimiter not in n[len(prefix) :]]
        self._answer({"items": [self._about(n) for n in items], "prefixes": folders if delimiter else []})
