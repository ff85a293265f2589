import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.report.charts import CHARTS, metrics_of
from olmo_hf.report.history import Series, load_history
from olmo_hf.report.html import render_page
from olmo_hf.report.packing import pack_column, pack_series
from tests.report.fake_run import START_TIME, make_run


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def unpack(column: str) -> np.ndarray:
    kind, _, text = column.partition(":")
    return np.frombuffer(base64.b64decode(text), {"u32": "<u4", "f32": "<f4", "f64": "<f8"}[kind])


def test_the_page_holds_the_curves_and_what_happened(run_dir: Path) -> None:
    data = data_of(render_page([load_history(run_dir)]))
    run = data["runs"][0]
    raw = run["series"]["train/CrossEntropyLoss"]["raw"]
    assert unpack(raw["steps"]).tolist() == list(range(1, 201))
    expected = load_history(run_dir).series["train/CrossEntropyLoss"].values.astype(np.float32)
    assert (unpack(raw["values"]) == expected).all()
    assert [mark["step"] for mark in run["marks"] if mark["kind"] == "restart"] == [100]
    assert [mark["step"] for mark in run["marks"] if mark["kind"] == "spike"] == [150]
    assert [mark["step"] for mark in run["marks"] if mark["kind"] == "evaluation"] == [50, 100, 150, 200]
    assert run["launches"][1] == ["2026-11-30 00:00:00 UTC", "100", "2 on a", "", "- old: 1\n+ old: 2"]
    titles = [chart["title"] for chart in data["charts"]]
    assert titles[0] == "Loss"
    assert data["charts"][0]["names"] == ["train/CrossEntropyLoss", "eval/c4/CrossEntropyLoss"]
    rates = next(chart for chart in data["charts"] if chart["title"] == "Learning rate")
    assert rates["names"] == ["optim/learning_rate_group0"], "equal groups are drawn once"


def test_nothing_comes_from_the_network_and_nothing_escapes_its_place(run_dir: Path) -> None:
    page = render_page([load_history(run_dir)])
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://|fetch\(|XMLHttp|WebSocket""", page)
    assert page.count("<script") == 2, "the settings of this run contain a script element"
    assert "<script>alert(1)</script>" in data_of(page)["runs"][0]["settings"]


def test_names_in_the_title_are_escaped(tmp_path: Path) -> None:
    page = render_page([load_history(make_run(tmp_path / "<b>&run"))])
    assert "<title>&lt;b&gt;&amp;run</title>" in page


def test_several_runs(tmp_path: Path, run_dir: Path) -> None:
    other = make_run(tmp_path / "other", seed=1)
    data = data_of(render_page([load_history(run_dir), load_history(other)]))
    assert [run["name"] for run in data["runs"]] == ["a-run", "other"]
    assert "no end recorded" in data["tiles"][0][1]


def test_a_long_curve_is_thinned_but_keeps_extremes_and_true_means() -> None:
    values = np.random.default_rng(0).normal(size=50_000)
    values[33_333] = 99.0
    values[44_444] = np.nan
    steps = np.arange(1, 50_001)
    packed = pack_series(Series(steps, steps * 2.0, steps * 1.0, values), max_points=3000)
    raw = unpack(packed["raw"]["values"])
    assert len(raw) <= 3000
    assert np.nanmax(raw) == 99.0
    assert np.isnan(raw).sum() == 1
    means = unpack(packed["means"]["values"])
    assert len(means) == 3000
    assert means[:2] == pytest.approx([values[:16].mean(), values[16:33].mean()], abs=1e-6)


def test_pack_column_keeps_what_json_cannot_say() -> None:
    assert np.isnan(unpack(pack_column(np.array([np.nan]), "f32"))[0])
    assert unpack(pack_column(np.array([-np.inf, 1e300]), "f32")).tolist() == [-np.inf, np.inf]


def test_downstream_metrics_and_perplexities_find_their_charts() -> None:
    names = ["eval/c4/Perplexity", "eval/downstream/piqa_len_norm", "eval/downstream_bpb/x_bpb", "train/Perplexity"]
    found = {chart.title: metrics_of(chart, names) for chart in CHARTS}
    assert found["Held-out perplexity"] == ["eval/c4/Perplexity"]
    assert found["Downstream tasks"] == ["eval/downstream/piqa_len_norm"]
    assert found["Downstream tasks, loss"] == ["eval/downstream_bpb/x_bpb"]


def test_going_back_is_marked_and_the_abandoned_steps_are_left_out(run_dir: Path) -> None:
    event = {"step": 150, "tokens": 0, "time": START_TIME + 2 * 199.5 + 1000, "event": "rollback", "from_step": 160}
    event |= {"passed_over_batches": 10, "count": 1, "position": {"epoch": 0, "instances": 640}}
    with open(run_dir / "events.jsonl", "a") as file:
        file.write(json.dumps(event) + "\n")
    run = data_of(render_page([load_history(run_dir)]))["runs"][0]
    (mark,) = [mark for mark in run["marks"] if mark["kind"] == "rollback"]
    assert mark == {"step": 150, "kind": "rollback", "text": "went back from step 160"}
    raw = run["series"]["train/CrossEntropyLoss"]["raw"]
    assert unpack(raw["steps"]).tolist() == [*range(1, 151), 200], "151 to 199 came before it"
    assert run["happenings"][-1][2] == "rollback: from_step 160, passed_over_batches 10, count 1"


def test_a_launch_says_on_what_it_ran(run_dir: Path) -> None:
    launch = {"time": "2026-11-30T01:00:00+00:00", "step": 9, "world_size": 8, "host": "b", "device": "H200"}
    with open(run_dir / "launches.jsonl", "a") as file:
        file.write(json.dumps({**launch, "threads": 4, "config": "a: 1"}) + "\n")
    run = data_of(render_page([load_history(run_dir)]))["runs"][0]
    assert run["launches"][-1][2] == "8 on b, H200, 4 threads"
