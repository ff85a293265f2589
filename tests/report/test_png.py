import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes

from olmo_hf.report import png
from olmo_hf.report.charts import Chart, charts_of
from olmo_hf.report.history import History, load_history
from olmo_hf.report.png import COLORS, draw_charts, draw_overview
from tests.report.fake_run import make_run


def share_of(path: Path, color: str) -> float:
    """Share of the picture's pixels that have exactly this colour."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int)  # (height, width, 3)
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return float((pixels == wanted).all(axis=-1).mean())


def draw(runs: list[History], tmp_path: Path, how: Callable[[Sequence[History], Path], None] = draw_overview) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        how(runs, tmp_path / "x.png")
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
    draw([replace(history, series=few)], tmp_path, draw_charts)
    only_rate = {"optim/learning_rate_group0": history.series["optim/learning_rate_group0"]}
    draw([replace(history, series=only_rate)], tmp_path)
    draw([replace(history, series=only_rate)], tmp_path, draw_charts)
    nothing_finite = replace(history.series["train/CrossEntropyLoss"], values=np.full(200, np.nan))
    draw([replace(history, series={"train/CrossEntropyLoss": nothing_finite})], tmp_path)
    draw([replace(history, series={"optim/total_grad_norm": nothing_finite})], tmp_path, draw_charts)


def test_every_chart_of_the_page_is_a_panel_as_it_says(run_dir: Path, tmp_path: Path, monkeypatch) -> None:
    drawn: dict[str, Axes] = {}
    panel = png._chart_panel

    def kept(axis: Axes, runs: Sequence[History], chart: Chart, names: Sequence[str]) -> None:
        panel(axis, runs, chart, names)
        drawn[chart.title] = axis

    monkeypatch.setattr(png, "_chart_panel", kept)
    history = load_history(run_dir)
    picture = draw([history], tmp_path, draw_charts)
    assert list(drawn) == [chart.title for chart, _ in charts_of([history])]
    assert {"Loss", "Held-out perplexity", "Throughput", "Where the time goes"} <= drawn.keys()
    assert {title for title, axis in drawn.items() if axis.get_yscale() == "log"} == {
        "Held-out perplexity",
        "Gradient norm",
    }
    assert len(drawn["Gradient norm"].lines) == 2, "the curve and its trend"
    assert len(drawn["Learning rate"].lines) == 1, "without a trend"
    assert [text.get_text() for text in drawn["Loss"].get_legend().get_texts()] == ["training", "c4"]
    assert share_of(picture, COLORS[0]) > 1e-3


def test_charts_of_two_runs_have_two_colours(run_dir: Path, tmp_path: Path) -> None:
    other = load_history(make_run(tmp_path / "other", seed=1))
    lifted = {name: replace(one, values=one.values + 1) for name, one in other.series.items()}
    picture = draw([load_history(run_dir), replace(other, series=lifted)], tmp_path, draw_charts)
    assert share_of(picture, COLORS[0]) > 1e-3
    assert share_of(picture, COLORS[1]) > 1e-3


def test_many_tasks_keep_apart(run_dir: Path, tmp_path: Path) -> None:
    history = load_history(run_dir)
    tasks = {f"eval/downstream/task_{n}": history.series["eval/c4/CrossEntropyLoss"] for n in range(27)}
    draw([replace(history, series=tasks)], tmp_path, draw_charts)
    looks = {png._look(number, 0, alone=True) for number in range(27)}
    assert len(looks) == 27
