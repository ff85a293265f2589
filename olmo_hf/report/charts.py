"""Which metrics share a chart, in the order a reader looks at them. Data, not logic."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """One chart of the report."""

    title: str
    """Heading."""

    metrics: tuple[str, ...]
    """Names or patterns (`*`), drawn in this order."""

    unit: str = ""
    """Beside the heading."""

    log_scale: bool = False
    """Whether the vertical axis starts logarithmic; the reader can change it."""

    percent: bool = False
    """Values are fractions, shown in percent."""

    smooth: bool = True
    """False for what has no noise: smoothing would only bend its corners."""


CHARTS: tuple[Chart, ...] = (
    Chart("Loss", ("train/CrossEntropyLoss", "eval/*/CrossEntropyLoss"), "cross-entropy, nats"),
    Chart("Held-out perplexity", ("eval/*/Perplexity",), "", log_scale=True),
    Chart("Held-out bits per byte", ("eval/*/BitsPerByte",)),
    Chart("Downstream tasks", ("eval/downstream/*",)),
    Chart("Downstream tasks, loss", ("eval/downstream_ce_loss/*", "eval/downstream_bpb/*")),
    Chart("Gradient norm", ("optim/total_grad_norm",), "before clipping", log_scale=True),
    Chart("Clipping rate", ("optim/clipping_rate",), "share of gradients clipped", percent=True),
    Chart("Learning rate", ("optim/learning_rate_group*",), smooth=False),
    Chart("z-loss", ("train/ZLoss",)),
    Chart("Throughput", ("throughput/device/tokens_per_second",), "tokens per second and device"),
    Chart("Model FLOPs utilisation", ("throughput/device/mfu",), "", percent=True),
    Chart("Where the time goes", ("throughput/time_share/*",), "share of wall time", percent=True),
    Chart("Memory", ("System/*",), smooth=False),
    Chart("Masked instances", ("train/masked_instances*",)),
)


def metrics_of(chart: Chart, names: Iterable[str]) -> list[str]:
    """The metrics among `names` that belong on `chart`."""
    known = sorted(names)
    found: list[str] = []
    for pattern in chart.metrics:
        found.extend(name for name in known if fnmatch.fnmatchcase(name, pattern) and name not in found)
    return found
