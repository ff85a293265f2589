"""`loss.png`, the overview of one run or several, and `charts.png`, all curves: for a paper, a chat or a README."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, NullFormatter, PercentFormatter

from olmo_hf.report.charts import Chart, charts_of, label_of
from olmo_hf.report.history import History, Series
from olmo_hf.report.smoothing import keep_extremes, smooth
from olmo_hf.wording import short_number

COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
"""One per run, in order; told apart in greyscale and by the colour-blind as far as eight colours can be."""

_MAX_POINTS = 6000
_LOSS = "train/CrossEntropyLoss"
_INK, _FAINT = "#1f2937", "#9ca3af"
_KEYS_IN_A_COLUMN = 16
_Style = Literal["solid"] | tuple[float, tuple[float, ...]]
_STYLES: tuple[_Style, ...] = ("solid", (0, (4, 2)), (0, (1, 1)), (0, (6, 2, 1, 2)), (0, (8, 3)))


def draw_overview(runs: Sequence[History], path: Path) -> None:
    """Loss with held-out points, gradient norm and learning rate over steps, written as a PNG.

    Args:
        runs: drawn over each other, each in its colour.
        path: of the picture.
    """
    figure = Figure(figsize=(10, 8.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(3.2, 1.4, 1.1))
    for axis in axes:
        _quiet(axis)
    for number, run in enumerate(runs):
        color = COLORS[number % len(COLORS)]
        _loss_panel(axes[0], run, color, alone=len(runs) == 1)
        _line(axes[1], run.series.get("optim/total_grad_norm"), color)
        _line(axes[2], run.series.get("optim/learning_rate_group0"), color, with_trend=False)
    for run in runs if len(runs) == 1 else ():
        _marks(axes, run)
    _loss_limits(axes[0], runs)
    _positive_log_limits(axes[1], [run.series.get("optim/total_grad_norm") for run in runs])
    for axis, label in zip(axes, ("cross-entropy (nats)", "gradient norm", "learning rate"), strict=True):
        axis.set_ylabel(label, color=_INK)
    axes[2].set_xlabel("step", color=_INK)
    axes[2].set_ylim(bottom=0)
    axes[2].yaxis.set_major_formatter(lambda value, _: f"{value:.2g}" if value else "0")
    axes[2].xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.align_ylabels(axes)
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(frameon=False, loc="upper right", labelcolor=_INK, fontsize=9)
    figure.suptitle(_title(runs), x=0.01, ha="left", fontsize=12, color=_INK, fontweight="bold")
    figure.savefig(path)


def draw_charts(runs: Sequence[History], path: Path) -> None:
    """Every chart of the page as a panel over steps, written as a PNG.

    Args:
        runs: drawn over each other, each in its colour; one alone has a colour for each metric.
        path: of the picture.
    """
    charts = charts_of(runs)
    rows = -(-len(charts) // 2)
    figure = Figure(figsize=(15, 3 * rows + 0.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 2, squeeze=False).ravel()
    for axis in panels[len(charts) :]:
        axis.remove()
    for axis, (chart, names) in zip(panels, charts, strict=False):
        _quiet(axis)
        _chart_panel(axis, runs, chart, names)
    figure.suptitle(_title(runs), x=0.01, ha="left", fontsize=12, color=_INK, fontweight="bold")
    figure.savefig(path)


def _chart_panel(axis: Axes, runs: Sequence[History], chart: Chart, names: Sequence[str]) -> None:
    alone = len(runs) == 1
    shown: list[Series] = []
    for run_number, run in enumerate(runs):
        for number, name in enumerate(names):
            if name not in run.series:
                continue
            color, style = _look(number, 0 if alone else run_number, alone=alone)
            _line(axis, run.series[name], color, with_trend=chart.smooth, style=style)
            shown.append(run.series[name])
    axis.set_title(f"{chart.title} ({chart.unit})" if chart.unit else chart.title, loc="left", fontsize=10, color=_INK)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if chart.percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    if names[0] == _LOSS:
        _loss_limits(axis, runs)
    if chart.log_scale:
        _positive_log_limits(axis, shown, always=True)
    looks = [_look(number, 0, alone=alone) for number in range(len(names))]
    keys = [
        Line2D([], [], color=color if alone else _FAINT, linestyle=style, label=label_of(name))
        for (color, style), name in zip(looks, names, strict=True)
    ]
    if not alone:
        keys += [Line2D([], [], color=_look(0, n, alone=False)[0], label=run.name) for n, run in enumerate(runs)]
    axis.legend(
        handles=keys,
        frameon=False,
        loc="upper left",
        bbox_to_anchor=(1, 1),
        labelcolor=_INK,
        fontsize=7,
        ncols=-(-len(keys) // _KEYS_IN_A_COLUMN),
    )


def _look(metric: int, run: int, *, alone: bool) -> tuple[str, _Style]:
    """Colour and dashes: of the metric where there is one run, else the colour is the run's."""
    if alone:
        return COLORS[metric % len(COLORS)], _STYLES[metric // len(COLORS) % len(_STYLES)]
    return COLORS[run % len(COLORS)], _STYLES[metric % len(_STYLES)]


def _title(runs: Sequence[History]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    series = runs[0].series.get(_LOSS)
    if series is None:
        return runs[0].name
    tokens = short_number(float(series.tokens[-1]))
    finite = series.values[np.isfinite(series.values)]
    last = f", cross-entropy {smooth(finite)[-1]:.4f}" if len(finite) else ""
    return f"{runs[0].name}   step {series.steps[-1]:,}, {tokens} tokens{last}"


def _quiet(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axis.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.margins(x=0.01)


def _line(
    axis: Axes,
    series: Series | None,
    color: str,
    *,
    label: str | None = None,
    with_trend: bool = True,
    style: _Style = "solid",
) -> None:
    """The curve, thinned; faint, under its trend, unless that is not wanted."""
    if series is None:
        return
    shown = keep_extremes(series.values, _MAX_POINTS)
    few = len(series) < 30
    if not with_trend or few:
        marker = "." if few else None
        axis.plot(
            series.steps[shown],
            series.values[shown],
            color=color,
            linewidth=1.4,
            linestyle=style,
            label=label,
            marker=marker,
        )
        return
    axis.plot(series.steps[shown], series.values[shown], color=color, linewidth=0.7, alpha=0.3)
    average = smooth(series.values)
    axis.plot(series.steps[shown], average[shown], color=color, linewidth=1.7, linestyle=style, label=label)


def _is_held_out(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/CrossEntropyLoss")


def _loss_panel(axis: Axes, run: History, color: str, *, alone: bool) -> None:
    _line(axis, run.series.get(_LOSS), color, label="training" if alone else run.name)
    names = sorted(name for name in run.series if _is_held_out(name))
    for number, name in enumerate(names):
        held_out = run.series[name]
        axis.plot(
            held_out.steps,
            held_out.values,
            color=COLORS[(number + 1) % len(COLORS)] if alone else color,
            marker="o",
            markersize=4,
            markeredgecolor="white",
            markeredgewidth=0.6,
            linewidth=0.9,
            linestyle=(0, (4, 2)),
            label=name.removeprefix("eval/").removesuffix("/CrossEntropyLoss") if alone else None,
        )


def _marks(axes: Sequence[Axes], run: History) -> None:
    """Restarts as lines through all panels, spikes and non-finite losses as marks in the first."""
    for number, event in enumerate(run.restarts):
        for axis in axes:
            axis.axvline(
                event["step"],
                color=_INK,
                linewidth=0.8,
                linestyle=(0, (1, 2)),
                label="restart" if axis is axes[0] and number == 0 else None,
            )
    spikes = [event["step"] for event in run.events_called("loss_spike")]
    if spikes:
        axes[0].plot(
            spikes, [0.97] * len(spikes), "v", color="#dc2626", transform=axes[0].get_xaxis_transform(), label="spike"
        )
    series = run.series.get(_LOSS)
    if series is not None and not np.isfinite(series.values).all():
        broken = series.steps[~np.isfinite(series.values)]
        axes[0].axvspan(broken[0], broken[-1], color="#dc2626", alpha=0.12, label="not finite")


def _loss_limits(axis: Axes, runs: Sequence[History]) -> None:
    """Shows the whole curve unless its beginning would flatten the rest: then the upper part is cut."""
    values = [run.series[_LOSS].values for run in runs if _LOSS in run.series]
    finite = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.zeros(0)
    if len(finite) < 200:
        return
    middle, high = np.quantile(finite, 0.98), finite.max()
    held_out = [s.values for run in runs for name, s in run.series.items() if _is_held_out(name)]
    low = min(float(np.nanmin(v, initial=np.inf)) for v in (finite, *held_out))
    if high - low > 2.5 * (middle - low) > 0:
        axis.set_ylim(low - 0.06 * (middle - low), middle + 1.2 * (middle - low))


def _positive_log_limits(axis: Axes, columns: Sequence[Series | None], *, always: bool = False) -> None:
    """Gradient norms span decades: a logarithmic axis when they do, or `always` where there is anything to show."""
    values = [column.values for column in columns if column is not None]
    positive = np.concatenate([v[np.isfinite(v) & (v > 0)] for v in values]) if values else np.zeros(0)
    if len(positive) and (always or positive.max() / positive.min() > 10):
        axis.set_yscale("log", subs=(2, 5))
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.yaxis.set_minor_formatter(
            NullFormatter() if positive.max() / positive.min() > 1000 else lambda value, _: f"{value:g}"
        )
