"""`scaling.png`: losses of a ladder of runs against tokens and against size, with the fitted law."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from olmo_hf.recipes.finished_runs import TRAINING_LOSS
from olmo_hf.recipes.ladder import TOKENS_PER_PARAMETER
from olmo_hf.recipes.scaling_law import Point, ScalingLaw
from olmo_hf.report.history import History
from olmo_hf.report.png import COLORS
from olmo_hf.report.smoothing import keep_extremes, smooth
from olmo_hf.wording import short_number

_SHOWN_POINTS = 1500
_WARM = 0.1
"""The beginning of a curve, this part of the run, is left out: it would flatten the rest."""


def draw_scaling(
    points: Sequence[Point], path: Path, *, law: ScalingLaw, runs: Sequence[History] = (), loss_name: str = "loss"
) -> None:
    """Two panels: loss against tokens, one colour per size, and loss against size, one per multiple of Chinchilla.

    Args:
        points: The finished runs.
        path: Of the PNG.
        law: Drawn as dashed lines through the points.
        runs: Their records, for the thin curves of training; may be empty.
        loss_name: On the vertical axis.
    """
    figure = Figure(figsize=(12, 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    _against_tokens(left, points, law, runs)
    _against_size(right, points, law)
    left.set_ylabel(f"{loss_name} (nats)")
    for axis in (left, right):
        axis.set_xscale("log")
        # Whole decades, and twice and five times them where less than two decades are shown.
        low, high = axis.get_xlim()
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(lambda value, _: short_number(value))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(color="#e5e7eb", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(law.formula(), x=0.01, ha="left", fontsize=11)
    figure.savefig(path)


def _against_tokens(axis: Axes, points: Sequence[Point], law: ScalingLaw, runs: Sequence[History]) -> None:
    by_name = {run.name: run for run in runs}
    for number, size in enumerate(sorted({point.parameters for point in points})):
        color = COLORS[number % len(COLORS)]
        own = sorted((point for point in points if point.parameters == size), key=lambda point: point.tokens)
        for point in own:
            if point.name in by_name:
                _curve(axis, by_name[point.name], color)
        tokens = np.geomspace(own[0].tokens * 0.7, own[-1].tokens * 1.4, 50)
        axis.plot(tokens, [law.predict(size, count) for count in tokens], color=color, linestyle="--", linewidth=1)
        axis.plot(
            [point.tokens for point in own],
            [point.loss for point in own],
            "o",
            color=color,
            label=f"{short_number(size)} parameters",
        )
    axis.set_xlabel("tokens")


def _against_size(axis: Axes, points: Sequence[Point], law: ScalingLaw) -> None:
    groups: dict[float, list[Point]] = {}
    for point in points:
        ratio = point.tokens / (TOKENS_PER_PARAMETER * point.parameters)
        groups.setdefault(float(f"{ratio:.2g}"), []).append(point)
    for number, (multiple, own) in enumerate(sorted(groups.items())):
        color = COLORS[number % len(COLORS)]
        own.sort(key=lambda point: point.parameters)
        sizes = np.geomspace(own[0].parameters * 0.7, own[-1].parameters * 1.4, 50)
        losses = [law.predict(size, multiple * TOKENS_PER_PARAMETER * size) for size in sizes]
        axis.plot(sizes, losses, color=color, linestyle="--", linewidth=1)
        axis.plot(
            [point.parameters for point in own],
            [point.loss for point in own],
            "o",
            color=color,
            label=f"{multiple:g} x {TOKENS_PER_PARAMETER} tokens per parameter",
        )
    axis.set_xlabel("parameters without embeddings")


def _curve(axis: Axes, run: History, color: str) -> None:
    series = run.series.get(TRAINING_LOSS)
    if series is None:
        return
    shown = keep_extremes(series.values, _SHOWN_POINTS)
    shown = shown[series.tokens[shown] > _WARM * np.nanmax(series.tokens)]
    axis.plot(series.tokens[shown], smooth(series.values)[shown], color=color, linewidth=0.7, alpha=0.5)
