"""Curves for the page: thinned to a number of points that a browser draws at once, and packed as base64 columns."""

import base64
from typing import Any

import numpy as np

from olmo_hf.report.history import History, Series
from olmo_hf.report.smoothing import keep_extremes

MAX_POINTS_ALL_RUNS = 60_000
"""Points of one metric over all runs of a page: at some 25 metrics the page stays under 20 MB."""

_MAX_MEANS = 6_000
_MAX_MAP_POINTS = 2_000
_TYPES = {"u32": "<u4", "f32": "<f4", "f64": "<f8"}


def pack_column(values: np.ndarray, kind: str) -> str:
    """`kind:base64` of little-endian numbers; `kind` is `u32`, `f32` or `f64`. NaN and infinities survive."""
    with np.errstate(over="ignore"):
        return f"{kind}:{base64.b64encode(values.astype(_TYPES[kind]).tobytes()).decode()}"


def pack_series(series: Series, max_points: int) -> dict[str, Any]:
    """The curve thinned to its extremes (`raw`) and, if anything was left out, means of equal stretches (`means`).

    The page smooths `means`: a mean over extremes would be wrong.
    """
    shown = keep_extremes(series.values, max_points)
    packed = {"raw": _pack_points(series.steps[shown], series.values[shown])}
    if len(shown) < len(series):
        packed["means"] = _pack_points(*_means(series, min(_MAX_MEANS, max_points)))
    return packed


def _pack_points(steps: np.ndarray, values: np.ndarray) -> dict[str, str]:
    return {"steps": pack_column(steps, "u32"), "values": pack_column(values, "f32")}


def _means(series: Series, stretches: int) -> tuple[np.ndarray, np.ndarray]:
    edges = np.linspace(0, len(series), stretches + 1).astype(np.int64)[:-1]
    finite = np.isfinite(series.values)
    sums = np.add.reduceat(np.where(finite, series.values, 0.0), edges)
    counts = np.add.reduceat(finite.astype(np.int64), edges)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)
    middle = np.diff(np.append(edges, len(series))) // 2
    return series.steps[edges + middle], means


def pack_map(run: History) -> dict[str, str]:
    """Tokens and hours of some steps, from which the page interpolates: the other two horizontal axes."""
    longest = max(run.series.values(), key=len)
    keep = np.unique(np.linspace(0, len(longest) - 1, min(len(longest), _MAX_MAP_POINTS)).astype(np.int64))
    hours = (longest.times[keep] - longest.times[0]) / 3600
    return {
        "step": pack_column(longest.steps[keep], "f64"),
        "tokens": pack_column(longest.tokens[keep], "f64"),
        "hours": pack_column(hours, "f64"),
    }
