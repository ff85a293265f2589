"""The formulas of tasks, in closed form."""

import math

import numpy as np
import pytest

from olmo_hf.evaluation.scores import ContinuationTable, metric_name, task_score

# Three questions of two, three and two continuations.
TABLE = ContinuationTable(
    question=np.array([0, 0, 1, 1, 1, 2, 2]),
    answer=np.array([0, 2, 1]),
    num_characters=np.array([1, 2, 1, 2, 4, 1, 1]),
    num_bytes=np.array([1, 2, 1, 2, 5, 1, 1]),
)
SUMS = np.array([-1.0, -1.5, -2.0, -3.0, -4.0, -1.0, -1.0])


def test_shares_of_questions() -> None:
    # Chosen: 0, 0, and of two equal ones the first.
    assert task_score("acc", TABLE, SUMS) == pytest.approx(1 / 3)
    # Per character: -1, -.75 | -2, -1.5, -1 | equal.
    assert task_score("len_norm", TABLE, SUMS) == pytest.approx(1 / 3)
    aside = np.array([-1.0, -3.0, -2.0, -3.0, -6.0, -1.0, -2.0])
    # Differences: 0, 1.5 | 0, 0, 2 | 0, 1.
    assert task_score("pmi_dc", TABLE, SUMS, aside) == pytest.approx(2 / 3)


def test_pmi_takes_what_the_question_makes_more_likely() -> None:
    """A ratio of two negative sums would choose the other one."""
    table = ContinuationTable(np.array([0, 0]), np.array([0]), np.array([1, 1]), np.array([1, 1]))
    given, aside = np.array([-1.0, -4.0]), np.array([-4.0, -4.0])
    assert task_score("pmi_dc", table, given, aside) == 1.0
    assert np.argmax(given / aside) == 1


def test_f1_is_that_of_the_first_continuation() -> None:
    table = ContinuationTable(np.repeat(np.arange(4), 2), np.array([0, 0, 1, 1]), np.ones(8), np.ones(8))
    sums = np.array([0.0, -1, -1, 0, 0, -1, -1, 0])  # chosen: 0, 1, 0, 1
    assert task_score("f1", table, sums) == pytest.approx(0.5)
    assert task_score("f1", table, np.tile([-1.0, 0.0], 4)) == 0.0


def test_the_right_continuation_alone() -> None:
    assert task_score("ce_loss", TABLE, SUMS) == pytest.approx((1 / 1 + 4 / 4 + 1 / 1) / 3)
    assert task_score("bpb", TABLE, SUMS) == pytest.approx((1 / 1 + 4 / 5 + 1 / 1) / 3 / math.log(2))


@pytest.mark.parametrize("metric", ["acc", "f1", "len_norm", "ce_loss", "bpb"])
def test_a_broken_model_is_not_taken_for_a_bad_one(metric: str) -> None:
    broken = SUMS.copy()
    broken[3] = math.nan
    assert math.isnan(task_score(metric, TABLE, broken))


def test_names_are_the_originals() -> None:
    assert metric_name("piqa", "len_norm") == "eval/downstream/piqa_len_norm"
    assert metric_name("x_bpb", "bpb") == "eval/downstream_bpb/x_bpb_bpb"
    assert metric_name("y_ppl", "ce_loss") == "eval/downstream_ce_loss/y_ppl_ce_loss"
