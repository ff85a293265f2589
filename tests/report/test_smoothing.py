import numpy as np
import pytest

from olmo_hf.report.smoothing import keep_extremes, moving_average, smooth


def test_a_straight_line_stays_where_it_is() -> None:
    line = np.arange(50.0)
    # Only at the very end does the window lack its right half.
    assert moving_average(line, 9)[:-4] == pytest.approx(line[:-4])
    assert smooth(line)[0] == line[0]


def test_against_the_definition() -> None:
    values = np.random.default_rng(0).normal(size=40)
    values[7], values[20] = np.nan, np.inf
    average = moving_average(values, 7)
    for i in range(40):
        window = values[max(i - 3, 0) : i + min(i, 3) + 1]
        assert average[i] == pytest.approx(window[np.isfinite(window)].mean(), abs=1e-12)


def test_nothing_finite_gives_nan() -> None:
    assert np.isnan(moving_average(np.full(5, np.nan), 3)).all()


@pytest.mark.parametrize("count", [10, 999, 1000, 1001, 54_321])
def test_every_extreme_survives_thinning(count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    values[count // 3] = 50.0
    values[count // 2] = -50.0
    kept = keep_extremes(values, 1000)
    assert len(kept) <= 1000
    assert (np.diff(kept) > 0).all()
    assert {0, count // 3, count // 2, count - 1} <= set(kept.tolist())
    if count <= 1000:
        assert len(kept) == count


def test_a_nan_is_never_thinned_away() -> None:
    values = np.zeros(10_000)
    values[1234], values[9876] = np.nan, np.inf
    assert {1234, 9876} <= set(keep_extremes(values, 100).tolist())


def test_a_curve_of_nan_only() -> None:
    kept = keep_extremes(np.full(5000, np.nan), 100)
    assert 0 < len(kept) <= 100
