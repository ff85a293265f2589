"""Which metrics share a chart, in the order a reader looks at them, and their names there."""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_hf.report.history import History


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


def charts_of(runs: Sequence[History]) -> list[tuple[Chart, list[str]]]:
    """The charts for which any of the runs has metrics, with their names."""
    known = {name for run in runs for name in run.series}
    found = []
    for chart in CHARTS:
        names = metrics_of(chart, known)
        if chart.title == "Learning rate":
            names = [name for number, name in enumerate(names) if number == 0 or _differs(runs, names[0], name)]
        if names:
            found.append((chart, names))
    return found


def _differs(runs: Sequence[History], first: str, other: str) -> bool:
    """Whether two metrics differ anywhere; parameter groups mostly share one learning rate."""
    return any(
        first in run.series
        and other in run.series
        and not np.array_equal(run.series[first].values, run.series[other].values, equal_nan=True)
        for run in runs
    )


def label_of(name: str) -> str:
    """How a metric is called on its chart."""
    for end in ("/CrossEntropyLoss", "/Perplexity", "/BitsPerByte"):
        if name.startswith("eval/") and name.endswith(end):
            return name.removeprefix("eval/").removesuffix(end)
    names = {"train/CrossEntropyLoss": "training", "optim/total_grad_norm": "total norm"}
    return names.get(name, name.rsplit("/", 1)[-1].replace("_", " "))
