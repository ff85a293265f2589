import warnings
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from olmo_hf.report.history import History, load_history
from olmo_hf.report.png import COLORS, draw_overview
from tests.report.fake_run import make_run


def share_of(path: Path, color: str) -> float:
    """Share of the picture's pixels that have exactly this colour."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)  # (height, width, 3)
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return float((pixels == wanted).all(axis=-1).mean())


def draw(runs: list[History], tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_overview(runs, tmp_path / "x.png")
    return tmp_path / "x.png"


def test_one_run_is_drawn_in_the_first_colour_with_its_marks(run_dir: Path, tmp_path: Path) -> None:
    picture = draw([load_history(run_dir)], tmp_path)
    assert share_of(picture, COLORS[0]) > 1e-3
    assert share_of(picture, COLORS[1]) > 1e-4, "held-out points and the mark of the spike"


def test_two_runs_have_two_colours(run_dir: Path, tmp_path: Path) -> None:
    other = load_history(make_run(tmp_path / "other", seed=1))
    lifted = {name: replace(one, values=one.values + 1) for name, one in other.series.items()}
    picture = draw([load_history(run_dir), replace(other, series=lifted)], tmp_path)
    assert share_of(picture, COLORS[0]) > 1e-3
    assert share_of(picture, COLORS[1]) > 1e-3


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_loss_that_is_not_a_number_is_shown_as_such(run_dir: Path, tmp_path: Path, broken: float) -> None:
    history = load_history(run_dir)
    values = history.series["train/CrossEntropyLoss"].values.copy()
    values[150:] = broken
    history.series["train/CrossEntropyLoss"] = replace(history.series["train/CrossEntropyLoss"], values=values)
    before = share_of(draw([load_history(run_dir)], tmp_path), "#ffffff")
    assert share_of(draw([history], tmp_path), "#ffffff") < before - 0.05, "a quarter of the panel is tinted"


def test_runs_with_little_to_show(run_dir: Path, tmp_path: Path) -> None:
    history = load_history(run_dir)
    few = {
        name: replace(s, **{f: getattr(s, f)[:3] for f in ("steps", "tokens", "times", "values")})
        for name, s in history.series.items()
    }
    draw([replace(history, series=few)], tmp_path)
    only_rate = {"optim/learning_rate_group0": history.series["optim/learning_rate_group0"]}
    draw([replace(history, series=only_rate)], tmp_path)
    nothing_finite = replace(history.series["train/CrossEntropyLoss"], values=np.full(200, np.nan))
    draw([replace(history, series={"train/CrossEntropyLoss": nothing_finite})], tmp_path)
