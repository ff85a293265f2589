"""Signals that ask a process to stop, turned into a note that is read between steps."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGTERM: schedulers and launchers. SIGINT: Ctrl-C. SIGUSR1: what SLURM is often told to send before a job ends."""

PRESSED = b"\nCtrl-C: this step ends, a checkpoint is written, and the run ends. Once more: it ends at once.\n"
"""Said at once, because a step may take long and a launcher shows its own traceback meanwhile."""

SAME_REQUEST_SECONDS = 3.0
"""Signals so close together are one request: a scheduler signals all processes, and the launcher passes on its own."""


class StopSignals:
    """While installed, the first request is noted in `received`; a second one does what it would have done before.

    Processes forked meanwhile inherit the handlers and pay no attention to them: there a signal does what it always
    did. Data loader workers have their own rule (`training.worker_signals`).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.received: signal.Signals | None = None
        self._clock = clock
        self._first_at: float | None = None
        self._process = 0
        self._before: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Takes the signals over. Python allows it in the main thread only; elsewhere nothing happens."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self.received, self._first_at, self._process = None, None, os.getpid()
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self._first_at is None:
            self._first_at = self._clock()
            self.received = signal.Signals(number)
            if number == signal.SIGINT and os.environ.get("LOCAL_RANK", "0") == "0":
                os.write(2, PRESSED)  # nothing else may be done here; the launcher may be gone by now
        elif self._clock() - self._first_at > SAME_REQUEST_SECONDS:
            self.restore()
            os.kill(os.getpid(), number)
