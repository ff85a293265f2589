"""Standard output and error that cannot end a run: what can no longer be written is dropped."""

import contextlib
import io
import os
import sys
from typing import Any

STREAMS = {"stdout": 1, "stderr": 2}


class _DroppingFile(io.FileIO):
    """Identical to `FileIO` except that what cannot be written counts as written.

    A pipe whose reader is gone, a terminal that was closed, a log on a full disk: training goes on without them, and
    shows up again where there is room again.
    """

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "w", closefd=False)
        self._has_failed = False

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            written = None
            if not self._has_failed and self.fileno() == STREAMS["stdout"]:
                with contextlib.suppress(OSError):
                    os.write(STREAMS["stderr"], f"standard output is lost from here on ({error.strerror})\n".encode())
            self._has_failed = True
        # None also comes from a pipe that does not wait and is full.
        return memoryview(data).nbytes if written is None else written


def keep_output() -> None:
    """From now on no write to standard output or error fails; streams that are closed lead nowhere."""
    _occupy_closed_descriptors()
    for name, descriptor in STREAMS.items():
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (for the whole process)
        elif type(stream) is io.TextIOWrapper and stream.fileno() == descriptor:  # not what a test put there
            with contextlib.suppress(OSError):
                stream.flush()
            kept = io.TextIOWrapper(
                io.BufferedWriter(_DroppingFile(descriptor)),
                encoding=stream.encoding,
                errors=stream.errors,
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, kept)


def _occupy_closed_descriptors() -> None:
    """A file opened later must not become standard output: whoever prints there would write into it."""
    while True:
        descriptor = os.open(os.devnull, os.O_RDWR)
        if descriptor > STREAMS["stderr"]:
            os.close(descriptor)
            return
