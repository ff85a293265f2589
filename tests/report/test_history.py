from pathlib import Path

import numpy as np
import pytest

from olmo_hf.errors import DataError
from olmo_hf.report.history import is_wanted, load_history
from tests.report.fake_run import TOKENS_PER_STEP, make_run, metrics_row, write_lines


def test_the_abandoned_stretch_is_left_out(run_dir: Path) -> None:
    history = load_history(run_dir)
    loss = history.series["train/CrossEntropyLoss"]
    assert loss.steps.tolist() == list(range(1, 201))
    assert loss.tokens.tolist() == [step * TOKENS_PER_STEP for step in range(1, 201)]
    assert (loss.times[100:] - 1000 == loss.times[0] + 2.0 * np.arange(100, 200)).all(), "of the second launch"
    assert [event["step"] for event in history.restarts] == [100]
    assert history.series["eval/c4/Perplexity"].steps.tolist() == [50, 100, 150, 200]


def test_norms_of_single_parameters_are_not_loaded(run_dir: Path) -> None:
    assert not [name for name in load_history(run_dir).series if name.startswith("optim/grad/")]
    assert is_wanted("optim/total_grad_norm")


def test_a_stretch_that_was_not_trained_again_is_left_out_too(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=110, restart_at=100)  # the first launch reached step 120
    assert load_history(run_dir).series["train/CrossEntropyLoss"].steps[-1] == 110


def test_a_run_without_events_is_read_by_its_steps(run_dir: Path) -> None:
    (run_dir / "events.jsonl").unlink()
    history = load_history(run_dir)
    assert history.series["train/CrossEntropyLoss"].steps.tolist() == list(range(1, 201))
    assert history.restarts == []


def test_nan_stays_nan(tmp_path: Path) -> None:
    row = metrics_row(1, 0, 1.0)
    write_lines(tmp_path / "metrics.jsonl", [{**row, "train/CrossEntropyLoss": "NaN"}])
    assert np.isnan(load_history(tmp_path).series["train/CrossEntropyLoss"].values).all()


def test_no_run_and_no_row_are_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no metrics\.jsonl.*Give the directory of a run"):
        load_history(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no row yet"):
        load_history(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "other": 2.0}\n')
    with pytest.raises(DataError, match="none of the metrics of a training run"):
        load_history(tmp_path)
