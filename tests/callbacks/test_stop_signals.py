"""Signals in processes of their own, since they end them."""

import signal
import subprocess
import sys

PROGRAM = """
import os, signal, sys, time
from olmo_hf.callbacks.stop_signals import StopSignals
signals = StopSignals()
signals.install()
{body}
"""
WAIT = "print('ready', flush=True)\nwhile True: time.sleep(0.05)"
FORK = """
child = os.fork()
if child == 0:
    while True: time.sleep(0.05)
print('ready', child, flush=True)
time.sleep(0.3)
os.kill(child, signal.SIGTERM)
time.sleep(0.3)
print(os.waitpid(child, os.WNOHANG) == (0, 0), flush=True)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], signals.received, flush=True)
"""


def start(body: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_the_second_signal_does_what_it_always_did() -> None:
    process = start(WAIT)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        code = None
    assert code is None, "the first signal is only noted"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM


def test_ctrl_c_twice_is_a_keyboard_interrupt() -> None:
    process = start(WAIT)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        code = None
    assert code is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors


def test_a_worker_lets_the_first_signal_pass_and_can_still_be_ended() -> None:
    process = start(FORK)
    output, errors = process.communicate(timeout=30)
    lines = output.splitlines()
    assert lines[1] == "True", (output, errors)
    assert lines[2] == f"{int(signal.SIGTERM)} None", "ended by the second; the parent has received nothing"
