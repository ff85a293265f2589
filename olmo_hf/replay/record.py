"""What a run recorded, as stretches: steps that followed one another without a restart or a going back."""

import datetime
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_hf.callbacks.json_lines import EVENTS_FILE, METRICS_FILE, read_json_lines
from olmo_hf.data.order import DataPosition
from olmo_hf.errors import DataError
from olmo_hf.training.run_directory import LAUNCHES_FILE

LOSS, GRADIENT_NORM = "train/CrossEntropyLoss", "optim/total_grad_norm"
COMPARED = (LOSS, GRADIENT_NORM)


@dataclass(frozen=True)
class Launch:
    """What is known of a launch."""

    time: float
    """Seconds since 1970."""

    world_size: int
    config_yaml: str | None
    """Its settings; None: a launch that did not record them, so that those of the last launch must do."""

    threads: int | None
    """Threads of one process; None: not recorded."""


@dataclass
class Stretch:
    """Steps of one launch in their order, from where it started or went back to."""

    launch: Launch
    start_step: int
    begin_time: float
    end_time: float = math.inf
    position: DataPosition | None = None
    """Where the data go on, if not where the checkpoint of `start_step` says: batches were skipped."""

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics by logged step."""

    def window_start(self, step: int) -> int:
        """The step after which the means of the row of `step` begin."""
        return max([self.start_step, *(logged for logged in self.rows if logged < step)])


@dataclass(frozen=True)
class Record:
    """A run's stretches in order of time, and when which checkpoint was written."""

    run_dir: Path
    stretches: list[Stretch]
    checkpoint_times: dict[int, list[float]]
    """Step -> times at which its checkpoint was written."""

    def attempts(self, step: int) -> list[Stretch]:
        """The stretches that logged this step, oldest first."""
        return [stretch for stretch in self.stretches if step in stretch.rows]

    def writer(self, step: int, *, before: float) -> tuple[Stretch, float] | None:
        """The stretch that wrote the checkpoint of `step` that was there at a moment, and when it did."""
        times = [time for time in self.checkpoint_times.get(step, []) if time < before]
        if not times:
            return None
        return next(s for s in reversed(self.stretches) if s.begin_time <= times[-1]), times[-1]

    @property
    def logged_steps(self) -> list[int]:
        """Every step that any stretch logged, ascending."""
        return sorted({step for stretch in self.stretches for step in stretch.rows})


def read_record(run_dir: Path) -> Record:
    """Reads `metrics.jsonl`, `events.jsonl` and `launches.jsonl` of a run, finished, going on or dead.

    Raises:
        DataError: there is no run, or nothing of it can be compared.
    """
    if not (run_dir / METRICS_FILE).is_file():
        raise DataError(f"{run_dir}: holds no {METRICS_FILE}; give the directory of a run that has logged steps")
    if not (run_dir / EVENTS_FILE).is_file():
        raise DataError(f"{run_dir}: holds no {EVENTS_FILE}, which tells where launches began; restore it from a copy")
    events = [e for e in read_json_lines(run_dir / EVENTS_FILE) if _is_stamped(e)]
    stretches = _stretches(events, _launches(run_dir))
    if not stretches:
        raise DataError(f"{run_dir / EVENTS_FILE}: tells of no start; give the directory of a run that has trained")
    begins = [stretch.begin_time for stretch in stretches]
    for row in read_json_lines(run_dir / METRICS_FILE):
        if _is_stamped(row) and isinstance(row.get(LOSS), float | int):
            found = stretches[max(bisect_right(begins, row["time"]) - 1, 0)]
            found.rows[row["step"]] = {key: float(row[key]) for key in COMPARED if key in row}
    times: dict[int, list[float]] = {}
    for event in events:
        if event.get("event") == "checkpoint":
            times.setdefault(event["step"], []).append(event["time"])
    return Record(run_dir, stretches, times)


def _is_stamped(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("step"), int) and isinstance(row.get("time"), int | float)


def _stretches(events: list[dict[str, Any]], launches: list[Launch]) -> list[Stretch]:
    found: list[Stretch] = []
    for event in events:
        kind = event.get("event")
        if kind not in ("start", "rollback"):
            continue
        known = [launch for launch in launches if launch.time <= event["time"]]
        launch = known[-1] if known else Launch(0.0, int(event.get("world_size", 1)), None, None)
        position = DataPosition(**event["position"]) if kind == "rollback" else None
        if found:
            found[-1].end_time = event["time"]
        found.append(Stretch(launch, event["step"], event["time"], position=position))
    return found


def _launches(run_dir: Path) -> list[Launch]:
    path = run_dir / LAUNCHES_FILE
    found = []
    for row in read_json_lines(path) if path.is_file() else ():
        try:
            time = datetime.datetime.fromisoformat(str(row.get("time"))).timestamp()
        except ValueError:
            continue
        found.append(Launch(time, int(row.get("world_size", 1)), row.get("config"), row.get("threads")))
    return found
