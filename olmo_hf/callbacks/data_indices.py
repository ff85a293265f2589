"""Record of what each rank read: `data-indices/rank{R}.tsv.gz`, lines `step TAB id,id,...`."""

import gzip
import logging
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import DataIndicesArgs
from olmo_hf.callbacks.json_lines import EVENTS_FILE, read_json_lines
from olmo_hf.data.order import DataPosition
from olmo_hf.training.callback import OlmoCallback

logger = logging.getLogger(__name__)

_READ_BYTES = 1 << 20
_MEMBER_START = b"\x1f\x8b\x08\x00\x00\x00\x00\x00"  # how gzip.compress(mtime=0) begins


def data_indices_path(run_dir: Path, rank: int) -> Path:
    """Where the instance ids of `rank` are recorded."""
    return run_dir / "data-indices" / f"rank{rank}.tsv.gz"


class DataIndices(OlmoCallback):
    """Appends whole gzip members, so that a kill spoils at most the member being written and never an older one.

    A member is written every `flush_steps`, before every checkpoint, so that what it builds upon is on disk, and when
    training fails: what the step read that was no number is the first thing to look at.
    Never truncates; after a restart that went back, later lines count.
    """

    def __init__(self, args: DataIndicesArgs, *, run_dir: Path, rank: int):
        self._path = data_indices_path(run_dir, rank)
        self._flush_steps = args.flush_steps
        self._lines: list[str] = []
        self._warned = False

    def on_instances(self, state: TrainerState, instance_ids: list[int]) -> None:
        self._lines.append(f"{state.global_step + 1}\t{','.join(map(str, instance_ids))}\n")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if len(self._lines) >= self._flush_steps or control.should_save:
            self.flush()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep; a checkpoint is being written, so the record goes to disk before it."""
        self.flush()
        return {}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.flush()

    def on_failure(self, state: TrainerState) -> None:
        self.flush()

    def flush(self) -> None:
        """Writes what was gathered as one gzip member. A disk that is full is reported once, and tried again later."""
        if not self._lines:
            return
        member = gzip.compress("".join(self._lines).encode(), compresslevel=6, mtime=0)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                if file.write(member) != len(member):
                    raise OSError("only part of a record was written")
        except OSError as error:
            if not self._warned:
                logger.warning("%s cannot be written (%s); the ids wait in memory.", self._path, error)
            self._warned = True
            return
        self._warned = False
        self._lines.clear()


def iter_data_indices(path: Path) -> Iterator[tuple[int, list[int]]]:
    """Every line of the record in the order it was written: step and instance ids.

    A member torn by a kill is passed over; the members after it are found and read. Memory: one member.
    """
    pending = b""
    with open(path, "rb") as file:
        while True:
            more = file.read(_READ_BYTES)
            pending += more
            pending = yield from _whole_members(pending, at_end=not more)
            if not more:
                return


def _whole_members(data: bytes, *, at_end: bool) -> Generator[tuple[int, list[int]], None, bytes]:
    """Yields the lines of the whole members at the start of `data`; returns what is left for the next read."""
    while data:
        member = zlib.decompressobj(wbits=31)
        try:
            text = member.decompress(data)
            torn = not member.eof and at_end
        except zlib.error:
            torn = True
        if torn:
            next_start = data.find(_MEMBER_START, 1)
            if next_start < 0:
                # Keep what may be the beginning of the next member's header, cut by the end of this read.
                return b"" if at_end else data[-(len(_MEMBER_START) - 1) :]
            data = data[next_start:]
            continue
        if not member.eof:
            return data
        for line in text.decode().splitlines():
            step, _, ids = line.partition("\t")
            yield int(step), [int(instance) for instance in ids.split(",") if instance]
        data = member.unused_data
    return b""


def read_data_indices(path: Path, steps: range | None = None) -> dict[int, list[int]]:
    """Instance ids by step, as the run that was continued read them.

    A line that goes back to an earlier step begins a restart: the abandoned lines at and after that step are dropped.

    Args:
        path: one rank's file.
        steps: only these steps. None: all.
    """
    found: dict[int, list[int]] = {}
    newest = 0
    for step, instances in iter_data_indices(path):
        if step <= newest:
            for abandoned in [other for other in found if other >= step]:
                del found[abandoned]
        newest = step
        if steps is None or step in steps:
            found[step] = instances
    return found


def times_read(path: Path) -> dict[int, int]:
    """How often each step of the run was read: more than once, where a restart went back before it.

    A step that was read and abandoned, and that the run never reached again, is not among them.
    """
    counts: dict[int, int] = {}
    newest = 0
    for step, _ in iter_data_indices(path):
        counts[step] = counts.get(step, 0) + 1
        newest = step
    return {step: count for step, count in counts.items() if step <= newest}


def read_returns(run_dir: Path) -> list[tuple[int, DataPosition]]:
    """Where the data of a run do not simply go on: the step, and the place in the data from which it went on.

    That is where the run went back and passed over batches, and where it began, if that was another run's checkpoint,
    since its data may have been moved then. Restarts of its own count for nothing: they must go on where the run was.
    Only what still holds: a restart from before such a step undoes it.
    """
    path = run_dir / EVENTS_FILE
    found: list[tuple[int, DataPosition]] = []
    first_step: int | None = None
    for event in read_json_lines(path) if path.is_file() else ():
        if event.get("event") not in ("start", "rollback"):
            continue
        step: int = event["step"]
        found = [(other, position) for other, position in found if other < step]
        is_start = event["event"] == "start"
        if is_start and first_step is not None and step > first_step:
            continue
        if is_start:
            first_step = step
        if "position" in event:
            place = (step, DataPosition(**event["position"]))
            found += [place] if place != (0, DataPosition()) else []
    return found
