"""What may be asked beside training: the `callbacks` section. A block that is present turns its feature on."""

from dataclasses import dataclass


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

    style: str = "auto"
    """`bar`, `lines` or `auto` (a bar on a terminal, lines elsewhere)."""


@dataclass(frozen=True, kw_only=True)
class CallbacksArgs:
    """One optional block per feature."""

    speed_monitor: SpeedMonitorArgs | None = None
    data_indices: DataIndicesArgs | None = None
    console: ConsoleArgs | None = None
