"""What may be asked beside training: the `callbacks` section.

A block that is present turns its feature on; `null` turns a feature off that is on by default.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SpeedMonitorArgs:
    """Throughput and utilisation."""

    window_size: int = 20
    """Steps over which rates are averaged; saves and evaluations are left out."""

    peak_flops: float | None = None
    """Floating-point operations per second of one device. None: from a table of GPUs; a CPU is measured once."""


@dataclass(frozen=True, kw_only=True)
class DataIndicesArgs:
    """Record of the instances each rank read, step by step."""

    flush_steps: int = 100
    """Steps gathered into one gzip member; also flushed at every checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ConsoleArgs:
    """Progress on the terminal."""

    style: Literal["auto", "bar", "lines"] = "auto"
    """`bar` rewrites one line, `lines` appends, `auto` is a bar on a terminal and lines elsewhere."""

    seconds_between_lines: float = 2.0
    """With `lines`: shortest time between two progress lines; the first and the last are always shown."""


@dataclass(frozen=True, kw_only=True)
class GarbageCollectorArgs:
    """Python's collector runs at the same step on every rank instead of whenever it likes."""

    interval_steps: int = 1
    """Steps between two collections of the young generations; all generations are collected after a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class CancellationArgs:
    """Stopping before the end: by a file CANCEL in the run directory, a signal (SIGTERM, SIGINT, SIGUSR1), or this."""

    interval_steps: int = 1
    """Steps between two looks; all ranks then agree, which takes one small collective."""

    extra_steps: int = 0
    """Steps after the checkpoint, whose metrics overlap those of the launch that continues."""

    time_limit_seconds: float | None = None
    """Longest time of one launch, from the first step on. None: no limit."""

    deadline: str | None = None
    """Moment to stop, such as `2026-11-30T06:00:00+00:00`; without a zone the machine's own time is meant."""

    seconds_before_job_end: float | None = None
    """Stops so long before SLURM ends the job (`SLURM_JOB_END_TIME`). None: not looked at."""

    early_stopping_factor: float | None = None
    """Stops when, after the warm-up, a logged loss exceeds this many times the least so far. None: never."""

    wandb_poll_seconds: float | None = 120.0
    """Time between two looks for a tag `cancel`, `canceled` or `cancelled` on the run. None: not looked for."""


@dataclass(frozen=True, kw_only=True)
class LossSpikeArgs:
    """Marks steps whose cross-entropy lies far above what was usual."""

    window_steps: int = 128
    """Logged steps that say what is usual."""

    min_steps: int = 32
    """Logged steps before anything is called a spike."""

    threshold: float = 8.0
    """Distance from the median in robust standard deviations (1.4826 times the median absolute deviation)."""

    max_rollbacks: int = 0
    """How often in a run it goes back to the last checkpoint before a spike and passes over the batches in between.
    0: spikes are only marked."""


@dataclass(frozen=True, kw_only=True)
class MemoryArgs:
    """Peak memory over all ranks."""

    interval_steps: int = 10
    """Steps between two reports; the first two steps are always reported, if they are logged."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatArgs:
    """Reports a rank that hangs."""

    timeout_seconds: float = 600.0
    """Time without any progress after which the rank says where it is."""

    slow_timeout_seconds: float = 3600.0
    """The same before the first step has ended (compilation), inside an evaluation and inside a save."""


@dataclass(frozen=True, kw_only=True)
class ProfilerArgs:
    """Traces a few steps with the profiler of torch, and with that of Python."""

    skip_steps: int = 6
    """Steps of this launch before the trace."""

    num_steps: int = 3
    """Steps traced."""

    memory: bool = False
    """Whether allocations are recorded too."""

    stacks: bool = False
    """Whether the source lines are recorded too; slow."""

    python: bool = False
    """Whether the functions of Python are timed in the same steps (cProfile); not together with `stacks`."""


@dataclass(frozen=True, kw_only=True)
class ModelOutputsArgs:
    """Saves what every module gets and gives on chosen steps, to compare two runs module by module."""

    steps: tuple[int, ...] = ()
    """Steps whose first micro-batch is saved, on rank 0."""

    modules: tuple[str, ...] = ("*",)
    """Names of modules, or patterns, such as `model.layers.0*`."""


@dataclass(frozen=True, kw_only=True)
class UploadArgs:
    """Copies the record of a run elsewhere while it goes on: metrics, events, settings, indices."""

    to: str = ""
    """Address of the directory that takes them (`s3://bucket/run`, `gs://`, `file://`); that of `training.upload_to`
    will do."""

    interval_seconds: float = 300.0
    """Time between two looks for what has changed."""


@dataclass(frozen=True, kw_only=True)
class CallbacksArgs:
    """One optional block per feature."""

    speed_monitor: SpeedMonitorArgs | None = field(default_factory=SpeedMonitorArgs)
    """On by default."""

    data_indices: DataIndicesArgs | None = field(default_factory=DataIndicesArgs)
    """On by default."""

    console: ConsoleArgs | None = field(default_factory=ConsoleArgs)
    """On by default."""

    garbage_collector: GarbageCollectorArgs | None = field(default_factory=GarbageCollectorArgs)
    """On by default."""

    cancellation: CancellationArgs | None = field(default_factory=CancellationArgs)
    """On by default."""

    loss_spike: LossSpikeArgs | None = field(default_factory=LossSpikeArgs)
    """On by default."""

    memory: MemoryArgs | None = field(default_factory=MemoryArgs)
    """On by default."""

    heartbeat: HeartbeatArgs | None = field(default_factory=HeartbeatArgs)
    """On by default."""

    profiler: ProfilerArgs | None = None
    """Off by default."""

    model_outputs: ModelOutputsArgs | None = None
    """Off by default."""

    upload: UploadArgs | None = None
    """Off by default."""


def rollback_problems(args: CallbacksArgs, logging_steps: int) -> list[str]:
    """What is wrong between going back before spikes and the steps between two log lines."""
    spike = args.loss_spike
    if spike is None or spike.max_rollbacks <= 0 or logging_steps <= 1:
        return []
    return [
        f"callbacks.loss_spike.max_rollbacks is {spike.max_rollbacks}, but training.logging_steps comes to "
        f"{logging_steps} steps, whose mean does not say which step spiked; set logging_steps to 1."
    ]


def callbacks_problems(args: CallbacksArgs) -> list[str]:
    """What is wrong with the section, one sentence per problem."""
    problems = [
        f"callbacks.{key} is {value}, but must be {'above' if strict else 'at least'} {least}; give a larger number, "
        f"or `callbacks.{key.split('.')[0]}: null` to turn the feature off."
        for key, value, least, strict in _bounds(args)
        if value is not None and not (value > least if strict else value >= least)
    ]
    spike = args.loss_spike
    if spike is not None and spike.min_steps > spike.window_steps:
        problems.append(
            f"callbacks.loss_spike.min_steps is {spike.min_steps}, more than window_steps ({spike.window_steps}), "
            "so nothing would ever be a spike; lower it."
        )
    if args.profiler is not None and args.profiler.python and args.profiler.stacks:
        problems.append(
            "callbacks.profiler.python is true together with stacks, but Python has room for one; turn one off."
        )
    if args.upload is not None and "://" not in args.upload.to:
        problems.append(
            f"callbacks.upload.to is {args.upload.to!r}, but must be an address such as s3://bucket/run; write one, "
            "or leave the block out."
        )
    outputs = args.model_outputs
    if outputs is not None and (not outputs.steps or min(outputs.steps) < 1):
        problems.append(
            f"callbacks.model_outputs.steps is {list(outputs.steps)}, but must name steps from 1 on; write `[5]`, or "
            "leave the block out."
        )
    return problems


def _bounds(args: CallbacksArgs) -> Iterator[tuple[str, float | None, float, bool]]:
    """Key, value, bound, and whether the value must lie above the bound or may equal it."""
    if args.speed_monitor is not None:
        yield "speed_monitor.window_size", args.speed_monitor.window_size, 1, False
        yield "speed_monitor.peak_flops", args.speed_monitor.peak_flops, 0, True
    if args.data_indices is not None:
        yield "data_indices.flush_steps", args.data_indices.flush_steps, 1, False
    if args.console is not None:
        yield "console.seconds_between_lines", args.console.seconds_between_lines, 0, False
    if args.garbage_collector is not None:
        yield "garbage_collector.interval_steps", args.garbage_collector.interval_steps, 1, False
    if args.cancellation is not None:
        yield "cancellation.interval_steps", args.cancellation.interval_steps, 1, False
        yield "cancellation.extra_steps", args.cancellation.extra_steps, 0, False
        yield "cancellation.time_limit_seconds", args.cancellation.time_limit_seconds, 0, True
        yield "cancellation.seconds_before_job_end", args.cancellation.seconds_before_job_end, 0, False
        yield "cancellation.early_stopping_factor", args.cancellation.early_stopping_factor, 1, True
        yield "cancellation.wandb_poll_seconds", args.cancellation.wandb_poll_seconds, 0, True
    if args.loss_spike is not None:
        yield "loss_spike.window_steps", args.loss_spike.window_steps, 3, False
        yield "loss_spike.min_steps", args.loss_spike.min_steps, 3, False
        yield "loss_spike.threshold", args.loss_spike.threshold, 0, True
        yield "loss_spike.max_rollbacks", args.loss_spike.max_rollbacks, 0, False
    if args.memory is not None:
        yield "memory.interval_steps", args.memory.interval_steps, 1, False
    if args.heartbeat is not None:
        yield "heartbeat.timeout_seconds", args.heartbeat.timeout_seconds, 0, True
        yield "heartbeat.slow_timeout_seconds", args.heartbeat.slow_timeout_seconds, 0, True
    yield from _bounds_of_what_is_off_by_default(args)


def _bounds_of_what_is_off_by_default(args: CallbacksArgs) -> Iterator[tuple[str, float | None, float, bool]]:
    if args.upload is not None:
        yield "upload.interval_seconds", args.upload.interval_seconds, 0, True
    if args.profiler is not None:
        yield "profiler.skip_steps", args.profiler.skip_steps, 0, False
        yield "profiler.num_steps", args.profiler.num_steps, 1, False
