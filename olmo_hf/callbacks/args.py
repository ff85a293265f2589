"""What may be asked beside training: the `callbacks` section.

A block that is present turns its feature on; `null` turns a feature off that is on by default.
"""

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


def callbacks_problems(args: CallbacksArgs) -> list[str]:
    """What is wrong with the section, one sentence per problem."""
    problems: list[str] = []
    steps: dict[str, int] = {}
    if args.speed_monitor is not None:
        steps["speed_monitor.window_size"] = args.speed_monitor.window_size
    if args.data_indices is not None:
        steps["data_indices.flush_steps"] = args.data_indices.flush_steps
    if args.garbage_collector is not None:
        steps["garbage_collector.interval_steps"] = args.garbage_collector.interval_steps
    for key, value in steps.items():
        if value < 1:
            problems.append(
                f"callbacks.{key} is {value}; it counts steps and must be at least 1; give a larger number, "
                f"or `callbacks.{key.split('.')[0]}: null` to turn the feature off."
            )
    peak_flops = args.speed_monitor.peak_flops if args.speed_monitor is not None else None
    if peak_flops is not None and not peak_flops > 0:
        problems.append(
            f"callbacks.speed_monitor.peak_flops is {peak_flops}; it must be above 0 (an H100 has 989e12), "
            "or be left out to take it from the table."
        )
    if args.console is not None and not args.console.seconds_between_lines >= 0:
        problems.append(
            f"callbacks.console.seconds_between_lines is {args.console.seconds_between_lines}; "
            "it must be 0 (every logged step) or more."
        )
    return problems
