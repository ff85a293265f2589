"""Curves made readable: a moving average, and thinning that keeps every extreme."""

import numpy as np


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` of the values, (N,), made odd; non-finite values are left out.

    Centred, so that nothing seems to happen later than it did. At the start the window shrinks on both sides, or the
    steep beginning of a loss would be bent; at the end only what is missing is left out. Where a window holds no
    finite value the result is NaN.
    """
    half = max(window, 1) // 2
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    low = np.maximum(index - half, 0)
    high = np.minimum(index + np.minimum(index, half) + 1, len(values))
    number = counts[high] - counts[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(number > 0, (sums[high] - sums[low]) / number, np.nan)


def smooth(values: np.ndarray) -> np.ndarray:
    """The trend of a curve, (N,): a moving average over a fiftieth of it (at least 5 points), taken twice.

    Twice, so that a single spike becomes a small rounded bump and not a plateau with edges.
    """
    window = max(len(values) // 50, 5)
    return moving_average(moving_average(values, window), window)


def keep_extremes(values: np.ndarray, max_points: int) -> np.ndarray:
    """Positions of at most `max_points` of the values, (N,), that draw the same picture: the extremes of each stretch.

    The first and the last position stay, and so does the first non-finite value of a stretch: a NaN is never thinned
    away.
    """
    if len(values) <= max_points:
        return np.arange(len(values))
    stretches = max((max_points - 2) // 3, 1)
    edges = np.linspace(0, len(values), stretches + 1).astype(np.int64)
    finite = np.isfinite(values)
    # reduceat needs a value everywhere; a non-finite one must win neither contest.
    lows = _first_where(np.where(finite, values, np.inf), edges, np.minimum)
    highs = _first_where(np.where(finite, values, -np.inf), edges, np.maximum)
    bad = np.flatnonzero(~finite)
    first_bad = bad[np.unique(np.searchsorted(edges, bad, side="right"), return_index=True)[1]]
    return np.unique(np.concatenate([[0], lows, highs, first_bad, [len(values) - 1]]))


def _first_where(values: np.ndarray, edges: np.ndarray, extreme: np.ufunc) -> np.ndarray:
    best = extreme.reduceat(values, edges[:-1])
    stretch_of = np.searchsorted(edges, np.arange(len(values)), side="right") - 1
    hits = np.flatnonzero(values == best[stretch_of])
    return hits[np.unique(stretch_of[hits], return_index=True)[1]]
