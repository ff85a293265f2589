"""Servers for the tests of this folder."""

import threading
from collections.abc import Iterator

import pytest

from olmo_hf.data import remote
from tests.data.web_server import Server


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A web server; what may pass is tried again at once."""
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.001)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()
