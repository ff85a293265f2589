"""Updates that are no numbers: seen, counted, skipped or the end of the run."""

import pytest
import torch

from olmo_hf.training.clipping import gradient_norms
from olmo_hf.training.nan_policy import RankReport, SkippedSteps, is_finite, judge_step, not_a_number_message


def verdicts(pattern, policy, limit=2):
    """Verdict on each step of a run, `x` being a step that is no number."""
    skipped = SkippedSteps()
    found = [judge_step(step != "x", policy=policy, skipped=skipped, max_skipped_in_a_row=limit) for step in pattern]
    return found, skipped


def test_stop_ends_at_the_first():
    found, skipped = verdicts("..x", "stop")
    assert found == ["update", "update", "stop"]
    assert skipped == SkippedSteps(0, 0)


def test_skip_goes_on_and_counts():
    found, skipped = verdicts(".xx.x.", "skip")
    assert found == ["update", "skip", "skip", "update", "skip", "update"]
    assert skipped == SkippedSteps(total=3, in_a_row=0)


def test_skip_ends_after_too_many_in_a_row():
    found, skipped = verdicts("xx.xxx", "skip")
    assert found == ["skip", "skip", "update", "skip", "skip", "stop"]
    assert skipped == SkippedSteps(total=4, in_a_row=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nan_and_infinity_are_seen_in_loss_and_gradient(value, where):
    parameter, loss = torch.nn.Parameter(torch.zeros(3)), torch.tensor(1.0)
    parameter.grad = torch.ones(3)
    assert is_finite(gradient_norms([parameter]), loss) is True
    if where == "loss":
        loss = torch.tensor(value)
    else:
        parameter.grad[1] = value
    assert is_finite(gradient_norms([parameter]), loss) is False


def one_broken_rank(rank):
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    loss = torch.tensor(float("inf") if rank == 1 else 1.0)
    return [is_finite(gradient_norms([parameter]), loss), is_finite(gradient_norms([parameter]), torch.tensor(1.0))]


def test_all_ranks_see_what_one_has(two_ranks):
    assert two_ranks(one_broken_rank) == [[False, True], [False, True]]


NAN = float("nan")


def message(*reports, skipped=None):
    return not_a_number_message(step=7, reports=reports, skipped=skipped or SkippedSteps(), grad_norm=float("inf"))


def test_the_message_names_step_rank_and_instances():
    text = message(RankReport(3, NAN, [11, 42]), skipped=SkippedSteps(4, 2))
    for part in ("step 7", "rank 3", "[11, 42]", "after 2 updates skipped in a row", "inf", "No weight was changed"):
        assert part in text


def test_the_message_names_the_rank_that_has_it_and_no_other():
    text = message(RankReport(0, 2.5, [1, 2]), RankReport(1, NAN, [3, 4]), RankReport(2, 2.5, [5, 6]))
    assert text.startswith("step 7, rank 1: the update is not a number")
    assert "rank 1 (loss nan) read the instances [3, 4]:" in text
    assert "[1, 2]" not in text
    assert "[5, 6]" not in text


def test_where_only_the_gradient_is_none_every_rank_is_named():
    text = message(RankReport(0, 2.5, [1, 2]), RankReport(1, 2.5, [3, 4]))
    assert text.startswith("step 7, rank 0, 1: ")
    assert "[1, 2]" in text
    assert "[3, 4]" in text


def test_the_message_of_a_large_run_stays_short():
    text = message(*(RankReport(rank, NAN, list(range(1000))) for rank in range(512)))
    assert "rank 0, 1, 2, 3, ...:" in text
    assert "and 936 more]" in text
    assert len(text) < 3000
