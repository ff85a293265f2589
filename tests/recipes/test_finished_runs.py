"""Points of a scaling law from the records of runs, and their picture."""

import json

import numpy as np
import pytest

from olmo_hf.errors import DataError
from olmo_hf.recipes.finished_runs import load_runs, parameters_of, point_of
from olmo_hf.recipes.scaling_law import fit_law
from olmo_hf.recipes.scaling_picture import draw_scaling
from tests.model.tiny import tiny_model

STEPS, STEP_TOKENS = 200, 64


def write_run(directory, *, end_step=STEPS, floor=2.0, checkpoint=True):
    """A record whose training loss falls as floor + 1 / step; one evaluation at the end."""
    directory.mkdir()
    rows = [
        {"step": n, "tokens": n * STEP_TOKENS, "time": n, "train/CrossEntropyLoss": floor + 1 / n}
        for n in range(1, end_step + 1)
    ]
    rows.append({"step": end_step, "tokens": end_step * STEP_TOKENS, "time": end_step, "eval/a/CrossEntropyLoss": 7.0})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [
        {"step": 0, "time": 0, "event": "start", "max_steps": STEPS},
        {"step": end_step, "time": end_step, "event": "end", "max_steps": STEPS},
    ]
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if checkpoint:
        tiny_model().config.save_pretrained(directory / f"checkpoint-{end_step}")
    return directory


def test_the_training_loss_is_the_mean_of_the_last_fiftieth(tmp_path):
    (run,) = load_runs([write_run(tmp_path / "a")])
    point = point_of(run)
    assert point.loss == pytest.approx(2.0 + np.mean([1 / n for n in range(197, 201)]), abs=1e-12)
    assert point.tokens == STEPS * STEP_TOKENS
    model = tiny_model()
    assert point.parameters == model.num_parameters() - model.get_input_embeddings().weight.numel()
    assert point_of(run, "eval/a/CrossEntropyLoss").loss == 7.0


def test_a_run_that_is_not_finished_is_refused_unless_asked_for(tmp_path):
    good, stopped, dead = (write_run(tmp_path / name, end_step=n) for name, n in (("a", STEPS), ("b", 150), ("c", 90)))
    (dead / "events.jsonl").write_text("")
    with pytest.raises(DataError) as told:
        load_runs([good, stopped, dead])
    assert "stopped at step 150 of 200" in str(told.value)
    assert "has no end on record" in str(told.value)
    assert len(load_runs([good, stopped, dead], unfinished=True)) == 3


def test_a_run_without_a_size_is_named(tmp_path):
    directory = write_run(tmp_path / "a", checkpoint=False)
    with pytest.raises(DataError, match="no checkpoint and no usable config"):
        parameters_of(directory)


def test_the_picture_is_drawn_from_points_and_curves(tmp_path):
    runs = load_runs([write_run(tmp_path / f"run{n}", floor=2.0 + 1 / n) for n in (1, 2, 3)])
    points = [point_of(run) for run in runs]
    points = [type(p)(p.name, p.parameters * 4**n, p.tokens * 4**n, p.loss) for n, p in enumerate(points)]
    draw_scaling(points, tmp_path / "scaling.png", law=fit_law(points), runs=runs)
    content = (tmp_path / "scaling.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 10_000  # axes, curves and points, not an empty page of a few kilobytes
