"""The way to a recorded step: from which checkpoint, under whose settings, over which restarts."""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from olmo_hf.args import RunArgs
from olmo_hf.config_file import load_run
from olmo_hf.data.order import DataPosition
from olmo_hf.errors import CheckpointError, DataError
from olmo_hf.replay.record import GRADIENT_NORM, Launch, Record, Stretch
from olmo_hf.training import commit
from olmo_hf.training.run_directory import CONFIG_FILE


@dataclass(frozen=True)
class Segment:
    """Steps that are trained again in one go."""

    settings: RunArgs
    launch: Launch
    first_step: int
    """State from which it sets out."""

    last_step: int
    position: DataPosition | None
    """Where the data go on, if not where the checkpoint says."""

    rows: dict[int, dict[str, float]]
    """What was recorded of its steps, as far as the means can be formed again."""

    cuts: frozenset[int]
    """Steps at which the record's means began anew."""


@dataclass(frozen=True)
class Way:
    """How to come to a step."""

    checkpoint: Path | None
    """Where it begins; None: at the beginning of the launch, with fresh weights or its `training.resume`."""

    segments: list[Segment]
    notes: list[str]
    """What keeps the comparison from being exact, one sentence each."""


def find_way(record: Record, step: int, *, attempt: int | None = None) -> Way:
    """The shortest way from a whole checkpoint, or else from the beginning, to a logged step.

    Args:
        record: of the run.
        step: the step to compare.
        attempt: which of several times the step was trained, from 1. None: the last.

    Raises:
        DataError: the step was not logged, or not so often.
    """
    attempts = record.attempts(step)
    if not attempts:
        raise DataError(f"--step: found {step}, but {_what_was_logged(record, step)}")
    if attempt is not None and not 1 <= attempt <= len(attempts):
        raise DataError(f"--attempt: found {attempt}, but step {step} was trained {len(attempts)} times; count from 1")
    stretch = attempts[-1 if attempt is None else attempt - 1]
    notes: list[str] = []
    last, not_after = step, stretch.window_start(step)
    pieces: list[tuple[Stretch, int, int]] = []  # stretch, first step, last step
    checkpoint = None
    while True:
        first, checkpoint = _checkpoint_within(record, stretch, not_after, notes)
        pieces.insert(0, (stretch, first, last))
        if checkpoint is not None:
            break
        before = record.writer(stretch.start_step, before=stretch.begin_time)
        if before is None:
            break
        stretch, last = before[0], stretch.start_step
        not_after = last - 1
    if checkpoint is None and pieces[0][0].position is not None:
        raise CheckpointError(
            f"{record.run_dir}: the checkpoint that step {step} built upon is gone; bring it back, or choose a later "
            "step"
        )
    segments = _merged([_segment(record.run_dir, *piece, notes) for piece in pieces])
    return Way(checkpoint, segments, list(dict.fromkeys(notes)))


def _what_was_logged(record: Record, step: int) -> str:
    steps = record.logged_steps
    if not steps:
        return f"{record.run_dir} has logged no step yet"
    near = sorted(sorted(steps, key=lambda logged: abs(logged - step))[:2])
    return (
        f"{record.run_dir} has logged steps {steps[0]} to {steps[-1]}, of which the nearest are "
        f"{' and '.join(map(str, near))}; give one that was logged (`training.logging_steps`)"
    )


def _checkpoint_within(record: Record, stretch: Stretch, not_after: int, notes: list[str]) -> tuple[int, Path | None]:
    """The newest whole checkpoint of a stretch up to a step, or the one it set out from; else its first step."""
    for path in commit.list_checkpoints(record.run_dir):
        step = commit.step_of(path)
        times = record.checkpoint_times.get(step, [])
        if not stretch.start_step <= step <= not_after or not times:
            continue
        of_this = stretch.begin_time <= times[-1] < stretch.end_time and step > stretch.start_step
        set_out_from = step == stretch.start_step and times[-1] < stretch.begin_time
        if not of_this and not set_out_from:
            continue  # written again later, on another way
        try:
            if commit.verify(path).optimizer:
                return step, path
        except CheckpointError as error:
            notes.append(f"passed over: {error}")
    return stretch.start_step, None


def _segment(run_dir: Path, stretch: Stretch, first: int, last: int, notes: list[str]) -> Segment:
    settings = settings_of(run_dir, stretch.launch)
    if stretch.launch.config_yaml is None:
        notes.append(
            f"the launch that began at step {stretch.start_step} did not record its settings; {CONFIG_FILE} is"
        )
    rows = {step: dict(row) for step, row in stretch.rows.items() if first < step <= last}
    for step, row in rows.items():
        if stretch.window_start(step) < first:  # the mean began before: only what belongs to one step is comparable
            rows[step] = {key: value for key, value in row.items() if key == GRADIENT_NORM}
    position = stretch.position if first == stretch.start_step else None
    return Segment(settings, stretch.launch, first, last, position, rows, frozenset({first}))


def settings_of(run_dir: Path, launch: Launch) -> RunArgs:
    """The settings of a launch, or those of the last one where it did not record its own."""
    if launch.config_yaml is None:
        return load_run(run_dir / CONFIG_FILE)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / CONFIG_FILE
        path.write_text(launch.config_yaml, encoding="utf-8")
        return load_run(path)


def _merged(segments: list[Segment]) -> list[Segment]:
    """Neighbours that train alike become one: a restart changes nothing."""
    merged = segments[:1]
    for segment in segments[1:]:
        before = merged[-1]
        alike = (
            segment.position is None
            and what_trains(before.settings) == what_trains(segment.settings)
            and before.launch.world_size == segment.launch.world_size
        )
        if alike:
            merged[-1] = dataclasses.replace(
                before,
                last_step=segment.last_step,
                rows=before.rows | segment.rows,
                cuts=before.cuts | segment.cuts,
            )
        else:
            merged.append(segment)
    return merged


def what_trains(settings: RunArgs) -> tuple[object, ...]:
    """The settings that decide what a step does; how it is watched and saved is left out."""
    defaults = type(settings.training)()
    beside = (
        *("output_dir", "resume", "reset_optimizer", "reset_trainer_state", "restore_dataloader"),
        *("fast_forward_batches", "start_epoch", "stop_at", "stop_after", "save_interval"),
        *("save_interval_ephemeral", "save_interval_unsharded", "unsharded_optimizer", "keep_sharded"),
        *("keep_unsharded", "checkpoint_async", "upload_to", "save_at_start", "logging_steps", "report_to"),
    )
    training = dataclasses.replace(settings.training, **{name: getattr(defaults, name) for name in beside})
    return settings.model, settings.data, training
