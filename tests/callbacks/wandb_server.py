"""A stand-in for the W&B API on the loopback device: enough for a run to be online and to be asked for its tags."""

import gzip
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = {"id": "1", "name": "someone"}
PROJECT = {"id": "1", "internalId": "1", "name": "project", "entity": ENTITY, "entityName": "someone"}


class WandbServer:
    """Answers in the background until closed.

    `tags` may be changed, `broken` makes it refuse to tell of the run, and with `slow_seconds` every answer comes so
    much later; back at 0, those that wait come at once.
    """

    def __init__(self) -> None:
        self.tags: list[str] = []
        self.broken = False
        self.slow_seconds = 0.0
        self.asked_for_run = 0
        self.told_of_run = 0
        self.held = 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *words: Any) -> None:
                pass

            def reply(self, content: Any, status: int = 200) -> None:
                body = json.dumps(content).encode()
                server.hold()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def body(self) -> bytes:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return gzip.decompress(raw) if self.headers.get("Content-Encoding") == "gzip" else raw

            def do_GET(self) -> None:
                self.reply({})

            def do_PUT(self) -> None:
                self.body()
                self.reply({})

            def do_POST(self) -> None:
                raw = self.body()
                if self.path != "/graphql":
                    self.reply({})
                    return
                request = json.loads(raw)
                name = re.search(r"(?:query|mutation)\s+(\w+)", request.get("query", ""))
                operation = name.group(1) if name else ""
                if operation.endswith("Run"):
                    server.asked_for_run += 1
                    if server.broken:
                        self.reply({"errors": [{"message": "broken"}]}, status=400)
                        return
                self.reply({"data": server.answer(operation, request.get("variables") or {})})
                server.told_of_run += operation.endswith("Run")

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()

    def hold(self) -> None:
        """Lets a request wait."""
        self.held += self.slow_seconds > 0
        began = time.monotonic()
        while time.monotonic() - began < self.slow_seconds:
            time.sleep(0.01)

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation.endswith("Run"):
            return {"project": {**PROJECT, "run": self._run(variables.get("name", "run"))}}
        if operation in ("Viewer", "GetViewer", "GetDefaultEntity"):
            nobody: dict[str, Any] = {"edges": []}
            viewer = {"id": "1", "username": "someone", "entity": "someone", "name": "someone", "email": "a@b.c"}
            more = {"admin": False, "flags": "{}", "deletedAt": None, "teams": nobody, "apiKeys": nobody}
            return {"viewer": {**viewer, **more}}
        if operation == "UpsertBucket":
            run = self._run(variables.get("name", "run"))
            return {"upsertBucket": {"bucket": {**run, "project": PROJECT}, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/up/{file}"} for file in variables.get("files") or []]
            return {"createRunFiles": {"runID": "UnVuOjE=", "uploadHeaders": [], "files": files}}
        if operation.startswith("ServerInfo"):
            return {"serverInfo": {"cliVersionInfo": {"max_cli_version": "9.9.9"}, "features": []}}
        return {}

    def _run(self, name: str) -> dict[str, Any]:
        nothing = dict.fromkeys(("sweepName", "group", "jobType", "commit", "historyKeys"))
        texts = dict.fromkeys(("description", "notes"), "")
        objects = dict.fromkeys(("config", "systemMetrics", "summaryMetrics"), "{}")
        counts = dict.fromkeys(("historyLineCount", "logLineCount"), 0)
        times = dict.fromkeys(("createdAt", "heartbeatAt"), "2026-01-01T00:00:00Z")
        return {
            "id": "UnVuOjE=",
            "projectId": "1",
            "tags": list(self.tags),
            "name": name,
            "displayName": "run",
            "state": "running",
            "readOnly": False,
            "user": {"name": "someone", "username": "someone"},
            "events": [],
            "eventsTail": [],
            "sampledHistory": [[]],
            "files": {"edges": []},
            "project": PROJECT,
            **nothing,
            **texts,
            **objects,
            **counts,
            **times,
        }
