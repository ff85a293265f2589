"""`schedule.png`: the learning rate of a run before it is started."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.batch_plan import BatchPlan, Length, bolt_on_start, tokens_after
from olmo_hf.training.schedulers import learning_rate_curve

_POINTS = 2000
_INK, _FAINT, _LINE = "#1f2937", "#9ca3af", "#2563eb"


def schedule_points(
    scheduler: SchedulerArgs, *, peak_lr: float, plan: BatchPlan, bolt_on: float = 0.0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The curve as it will be used, from the first step of the run to its end or its horizon, whichever is later.

    Args:
        scheduler: the `training.scheduler` section.
        peak_lr: `training.learning_rate`.
        plan: lengths of the run.
        bolt_on: length of a second warm-up in the scheduler's units; 0.0 is none. With one, what was before this
            launch is left out.

    Returns:
        Steps, tokens after each of them, learning rates: thinned to about two thousand points, corners kept.

    Raises:
        ConfigError: the settings make no curve.
    """
    curve = learning_rate_curve(
        scheduler,
        peak_lr=peak_lr,
        max_steps=plan.max_steps,
        max_tokens=plan.max_tokens,
        bolt_on_start=bolt_on_start(scheduler, plan) if bolt_on > 0 else None,
        bolt_on_length=bolt_on,
    )
    per_step = 1 if scheduler.units == "steps" else plan.tokens_per_step
    first = plan.start.steps + 1 if bolt_on > 0 else 1
    last = max(plan.max_steps, plan.horizon.steps if plan.horizon is not None else 0)
    corners = [first, plan.warmup.steps, plan.max_steps, plan.stop_step, last]
    if scheduler.decay is not None and plan.horizon is not None:
        corners.append(int(plan.horizon.steps - scheduler.decay / per_step))
    if bolt_on > 0:
        corners.append(plan.start.steps + math.ceil(bolt_on / per_step))
    grid = np.linspace(first, last, min(_POINTS, last - first + 1)).round().astype(np.int64)
    steps = np.unique(np.concatenate([grid, [step for step in corners if first <= step <= last]]))
    tokens = np.array([tokens_after(plan, int(step)) for step in steps])
    rates = np.array([curve(int(step), int(token)) for step, token in zip(steps, tokens, strict=True)])
    return steps, tokens, rates


def draw_schedule(
    scheduler: SchedulerArgs,
    *,
    peak_lr: float,
    plan: BatchPlan,
    path: Path,
    bolt_on: float = 0.0,
    factors: Mapping[str, float] | None = None,
) -> None:
    """Draws the learning rate over steps, tokens on top, with the lengths that matter marked and named.

    Args:
        scheduler: the `training.scheduler` section.
        peak_lr: `training.learning_rate`.
        plan: lengths of the run.
        path: of the picture (PNG, or whatever its ending says).
        bolt_on: as for `schedule_points`.
        factors: `training.learning_rate_factors`: a fainter line for each of them.
    """
    steps, _, rates = schedule_points(scheduler, peak_lr=peak_lr, plan=plan, bolt_on=bolt_on)
    figure = Figure(figsize=(9, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.plot(steps, rates, color=_LINE, linewidth=1.9)
    _draw_factors(axis, steps, rates, factors or {})
    axis.set_xlim(0, steps[-1] * 1.02)
    axis.set_ylim(0, rates.max() * max(1.0, *(factors or {"": 1.0}).values()) * 1.22)
    _dress(axis)
    per_step = plan.tokens_per_step
    shift = plan.start.tokens - plan.start.steps * per_step

    def tokens_of(step: Any) -> Any:
        return step * per_step + shift

    def steps_of(tokens: Any) -> Any:
        return (tokens - shift) / per_step

    above = axis.secondary_xaxis("top", functions=(tokens_of, steps_of))
    above.xaxis.set_major_formatter(EngFormatter(sep=""))
    above.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    above.spines["top"].set_color(_FAINT)
    above.set_xlabel("tokens", color=_INK)
    _mark_lengths(axis, plan)
    if plan.stop_step < steps[-1]:
        axis.axvspan(plan.stop_step, steps[-1] * 1.02, color=_FAINT, alpha=0.15, linewidth=0)
    figure.suptitle(
        f"{scheduler.name}, peak {peak_lr:g}, last step at {rates[steps == plan.max_steps][0]:.3g}",
        x=0.01,
        ha="left",
        fontsize=12,
        color=_INK,
        fontweight="bold",
    )
    figure.savefig(path)


def _draw_factors(axis: Axes, steps: np.ndarray, rates: np.ndarray, factors: Mapping[str, float]) -> None:
    """Parameters that learn at another rate: their own line, named where it is highest."""
    top = int(rates.argmax())
    for pattern, factor in factors.items():
        axis.plot(steps, rates * factor, color=_LINE, linewidth=1.0, alpha=0.5)
        label = f"{pattern} (x {factor:g})"
        axis.annotate(label, (steps[top], rates[top] * factor), va="bottom", fontsize=8, color=_LINE)


def _dress(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(_FAINT)
    axis.tick_params(colors=_INK, labelsize=9, color=_FAINT)
    axis.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlabel("optimizer step", color=_INK)
    axis.set_ylabel("learning rate", color=_INK)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.2g}" if value else "0")


def _mark_lengths(axis: Axes, plan: BatchPlan) -> None:
    """Upright lines with their names; those that fall together share one."""
    named: dict[int, list[str]] = {}
    lengths: list[tuple[str, Length | None]] = [
        ("warm-up ends", plan.warmup),
        ("this launch stops", Length(plan.stop_step, 0)),
        ("run ends", Length(plan.max_steps, plan.max_tokens)),
        ("floor", plan.horizon),
    ]
    for name, length in lengths:
        if (
            length is not None
            and length.steps > 0
            and not (name == "this launch stops" and length.steps == plan.max_steps)
        ):
            named.setdefault(length.steps, []).append(name)
    right = axis.get_xlim()[1]
    for row, (step, names) in enumerate(sorted(named.items())):
        axis.axvline(step, color=_INK, linewidth=0.8, linestyle=(0, (2, 2)))
        to_the_left = step > right / 2
        axis.annotate(
            f"{', '.join(names)}: {step:,}",
            (step, 0.97 - 0.06 * row),
            xycoords=("data", "axes fraction"),
            xytext=(-5 if to_the_left else 5, 0),
            textcoords="offset points",
            ha="right" if to_the_left else "left",
            va="top",
            fontsize=9,
            color=_INK,
        )
