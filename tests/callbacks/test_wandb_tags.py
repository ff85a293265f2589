"""A tag on the tracker stops a run; whatever is wrong with the tracker does not."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from olmo_hf.callbacks.wandb_tags import TagWatch
from tests.callbacks.wandb_server import WandbServer


def wait_until(condition, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.parametrize("tag", ["cancel", "canceled", "cancelled"])
def test_a_tag_that_appears_is_found(tag: str) -> None:
    tags: set[str] = {"big", "run"}
    watch = TagWatch(0.01, lambda: tags)
    watch.start()
    time.sleep(0.05)
    assert not watch.found
    tags.add(tag)
    assert wait_until(lambda: watch.found)


def test_errors_are_outlived() -> None:
    answers = iter([OSError("no network"), ValueError("nonsense"), SystemError("worse")])

    def ask() -> set[str]:
        error = next(answers, None)
        if error is not None:
            raise error
        return {"cancel"}

    watch = TagWatch(0.01, ask)
    watch.start()
    assert wait_until(lambda: watch.found)


def test_a_slow_answer_holds_nobody_up() -> None:
    asked = threading.Event()

    def ask() -> set[str]:
        asked.set()
        time.sleep(60)
        return set()

    watch = TagWatch(0.01, ask)
    watch.start()
    assert asked.wait(5)
    began = time.monotonic()
    assert not watch.found
    watch.stop()
    assert time.monotonic() - began < 0.5


PROGRAM = """
import sys, time
import wandb
from olmo_hf.callbacks.wandb_tags import TagWatch, current_tags
assert current_tags() == set(), "no run yet"
wandb.init(project="project", entity="someone", id="run1", settings=wandb.Settings(console="off"))
watch = TagWatch(0.2)
watch.start()
print("online", flush=True)
deadline = time.monotonic() + 60
while not watch.found and time.monotonic() < deadline:
    time.sleep(0.02)
print("found" if watch.found else "not found", flush=True)
import os
os._exit(0)
"""


def test_the_real_client_against_a_server_that_fails_and_then_gets_the_tag(tmp_path: Path) -> None:
    server = WandbServer()
    environment = {
        **os.environ,
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "WANDB_MODE": "online",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "online\n"
        assert wait_until(lambda: server.asked_for_run >= 2, 30), "it asks again and again"
        server.broken = True
        before = server.asked_for_run
        assert wait_until(lambda: server.asked_for_run >= before + 2, 30), "an error does not end the asking"
        server.tags = ["Cancelled"]
        server.broken = False
        assert process.stdout.readline() == "found\n"
    finally:
        process.kill()
        process.wait()
        server.close()
