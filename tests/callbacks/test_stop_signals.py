"""Signals in processes of their own, since they end them."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

PROGRAM = """
import os, signal, sys, time
from olmo_hf.callbacks import stop_signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell begins without it
stop_signals.SAME_REQUEST_SECONDS = {same_request}
signals = stop_signals.StopSignals()
signals.install()
{body}
"""
WAIT = """
print('ready', flush=True)
while signals.received is None: time.sleep(0.01)
print(signals.received.name, flush=True)
while True: time.sleep(0.01)
"""
FORK = """
child = os.fork()
if child == 0:
    while True: time.sleep(0.05)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], signals.received, flush=True)
"""


Start = Callable[[str, float], subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a program; what still runs at the end of a test is ended."""
    started = []

    def begin(body: str, same_request: float) -> subprocess.Popen:
        program = PROGRAM.format(body=body, same_request=same_request)
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def until(process: subprocess.Popen, line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line + "\n"


def test_a_second_request_does_what_a_first_one_always_did(start: Start) -> None:
    process = start(WAIT, 0.1)
    until(process, "ready")
    process.send_signal(signal.SIGTERM)
    until(process, "SIGTERM")
    time.sleep(0.3)
    assert process.poll() is None, "the first is only noted"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM


def test_ctrl_c_twice_is_a_keyboard_interrupt(start: Start) -> None:
    process = start(WAIT, 0.1)
    until(process, "ready")
    process.send_signal(signal.SIGINT)
    until(process, "SIGINT")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors
    assert errors.startswith("\nCtrl-C: this step ends, a checkpoint is written, "), "said at once"
    assert errors.count("Ctrl-C") == 1


def test_the_same_request_by_two_ways_is_one(start: Start) -> None:
    process = start(WAIT, 60)
    until(process, "ready")
    process.send_signal(signal.SIGINT)
    until(process, "SIGINT")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None


def test_a_forked_process_ends_as_it_always_did(start: Start) -> None:
    process = start(FORK, 0.1)
    output, errors = process.communicate(timeout=30)
    assert output.splitlines() == [f"{int(signal.SIGTERM)} None"], errors
