"""Signals that ask a process to stop, turned into a note that is read between steps."""

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGTERM: schedulers and launchers. SIGINT: Ctrl-C. SIGUSR1: what SLURM is often told to send before a job ends."""


class StopSignals:
    """While installed, the first signal is noted in `received`; a second one does what it would have done before.

    Processes forked meanwhile (data loader workers) inherit the handlers. A scheduler signals the whole group, so a
    worker lets the first signal pass: its parent still needs it for the step that is under way.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._process = 0
        self._seen_in_worker = False

    def install(self) -> None:
        """Takes the signals over. Python allows it in the main thread only; elsewhere nothing happens."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self.received, self._process = None, os.getpid()
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}

    def restore(self) -> None:
        """Gives the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            if not self._seen_in_worker:
                self._seen_in_worker = True
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received = signal.Signals(number)
            return
        self.restore()
        os.kill(os.getpid(), number)
