"""Append-only files of one JSON object per line, for records that must survive a kill and never end a run.

The JSON is strict: a number that JSON cannot express is written as one of the strings `"NaN"`, `"Infinity"` and
`"-Infinity"`, and read back as the number.
"""

import json
import logging
import math
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
"""In the run directory: one row per logged step."""

EVENTS_FILE = "events.jsonl"
"""In the run directory: starts, checkpoints, spikes, cancellations, the end."""

_MAX_WAITING_LINES = 10_000
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def strict_json(value: Any) -> Any:
    """`value` with every number that JSON lacks replaced by its name. Tensors and numpy numbers become plain ones."""
    if isinstance(value, dict):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of `path` in file order; a line torn by a kill or a full disk is passed over."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict):
                yield {
                    key: _NON_FINITE.get(value, value) if type(value) is str else value for key, value in row.items()
                }


class JsonLinesFile:
    """Appends rows, each in one write that reaches the operating system before `append` returns.

    A disk that is full or a directory that vanished is reported once and costs no more than the rows: they wait in
    memory (the newest 10,000) and follow as soon as a write works again.
    """

    def __init__(self, path: Path):
        self.path = path
        self._waiting: deque[bytes] = deque(maxlen=_MAX_WAITING_LINES)
        self._failed = False
        self._at_line_start = False

    def append(self, row: dict[str, Any]) -> None:
        """Writes `row`; never raises for the disk's sake."""
        self._waiting.append(json.dumps(strict_json(row), allow_nan=False, default=str).encode() + b"\n")
        try:
            self._write_waiting()
        except OSError as error:
            if not self._failed:
                logger.warning(
                    "%s cannot be written (%s). Training goes on; rows wait in memory until there is room again.",
                    self.path,
                    error,
                )
            self._failed = True

    def _write_waiting(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+", buffering=0) as file:
            if not self._at_line_start and file.tell() > 0:
                file.seek(-1, 2)
                self._at_line_start = file.read(1) == b"\n"
            else:
                self._at_line_start = True
            while self._waiting:
                line = self._waiting[0] if self._at_line_start else b"\n" + self._waiting[0]
                self._at_line_start = False
                if file.write(line) != len(line):
                    raise OSError("only part of a line was written")
                self._at_line_start = True
                self._waiting.popleft()
        if self._failed:
            logger.warning("%s is written again.", self.path)
            self._failed = False
