"""A run as its record tells it: metrics by column, events, settings; built for millions of rows."""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from olmo_hf.callbacks.json_lines import EVENTS_FILE, METRICS_FILE, read_json_lines
from olmo_hf.errors import DataError

LAUNCHES_FILE = "launches.jsonl"
"""In the run directory: one row per launch, with what was changed since the one before."""

_WANTED = ("train/", "eval/", "throughput/", "System/")
_WANTED_OPTIM = ("optim/total_grad_norm", "optim/clipping_rate", "optim/learning_rate_group", "optim/update_cos_sim")


@dataclass(frozen=True)
class Series:
    """One metric over the run: `steps` (int64) and `tokens`, `times`, `values` (float64), all of one length."""

    steps: np.ndarray
    tokens: np.ndarray
    times: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class History:
    """What is known of one run. Abandoned stretches (after a restart that went back) are left out of `series`."""

    name: str
    run_dir: Path
    series: dict[str, Series]
    events: list[dict[str, Any]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    num_rows: int = 0

    def events_called(self, name: str) -> list[dict[str, Any]]:
        """Events of one kind, in order of time."""
        return [event for event in self.events if event.get("event") == name]

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """Every start but the first."""
        return self.events_called("start")[1:]


class _Columns:
    """Growing columns. The common columns of a row are kept once; a metric keeps row numbers and values."""

    def __init__(self) -> None:
        self.steps, self.tokens, self.times = array("q"), array("d"), array("d")
        self.metrics: dict[str, tuple[array[Any], array[Any]]] = {}  # row numbers, values
        self._unwanted: set[str] = set()

    def add(self, row: dict[str, Any]) -> None:
        row_number = len(self.steps)
        step = row["step"]
        self.steps.append(step)
        self.tokens.append(_number(row.get("tokens")))
        self.times.append(_number(row.get("time")))
        for key, value in row.items():
            column = self.metrics.get(key)
            if column is None:
                if key in self._unwanted:
                    continue
                if not is_wanted(key):
                    self._unwanted.add(key)
                    continue
                column = self.metrics[key] = (array("L"), array("d"))
            if type(value) is not float and type(value) is not int:
                continue
            rows, values = column
            while rows and self.steps[rows[-1]] >= step:
                rows.pop(), values.pop()
            rows.append(row_number)
            values.append(value)

    def go_back(self, step: int) -> None:
        """Forgets what was recorded after `step`: a restart took the run up there."""
        for rows, values in self.metrics.values():
            while rows and self.steps[rows[-1]] > step:
                rows.pop(), values.pop()

    def series(self) -> dict[str, Series]:
        steps, tokens, times = (np.array(column) for column in (self.steps, self.tokens, self.times))
        found = {}
        for key, (rows, values) in self.metrics.items():
            if rows:
                index = np.array(rows)
                found[key] = Series(steps[index], tokens[index], times[index], np.array(values))
        return found


def is_wanted(key: str) -> bool:
    """Whether a metric is shown in a report; the norms of single parameters are not."""
    return key.startswith(_WANTED) or key.startswith(_WANTED_OPTIM)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def load_history(run_dir: Path) -> History:
    """Reads the record of a run (`metrics.jsonl`, `events.jsonl`, `launches.jsonl`), finished, in progress or dead.

    Raises:
        DataError: there is no run, or it has logged nothing yet.
    """
    metrics_path, events_path = run_dir / METRICS_FILE, run_dir / EVENTS_FILE
    if not metrics_path.is_file():
        raise DataError(
            f"{run_dir} has no {METRICS_FILE}. Give the directory of a run (it holds config.yaml and {METRICS_FILE}) "
            "that has logged at least one step."
        )
    events = list(read_json_lines(events_path)) if events_path.is_file() else []
    starts = [e for e in events if e.get("event") in ("start", "rollback") and isinstance(e.get("step"), int)]
    columns = _Columns()
    for row in _rows_with_starts(metrics_path, starts, columns):
        columns.add(row)
    if not columns.steps:
        raise DataError(f"{metrics_path} holds no row yet; wait until the run has logged a step.")
    series = columns.series()
    if not series:
        raise DataError(f"{metrics_path} has rows, but none of the metrics of a training run in them.")
    launches_path = run_dir / LAUNCHES_FILE
    launches = list(read_json_lines(launches_path)) if launches_path.is_file() else []
    return History(run_dir.name, run_dir, series, events, launches, num_rows=len(columns.steps))


def _rows_with_starts(path: Path, starts: list[dict[str, Any]], columns: _Columns) -> Iterator[dict[str, Any]]:
    waiting = sorted(starts, key=lambda event: _number(event.get("time")))
    for row in read_json_lines(path):
        if not isinstance(row.get("step"), int):
            continue
        while waiting and _number(waiting[0].get("time")) <= _number(row.get("time")):
            columns.go_back(waiting.pop(0)["step"])
        yield row
