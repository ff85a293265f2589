"""Schedules against recorded values of the original trainer, and the clock under Hugging Face's order of calls.

Tolerance 1e-12 relative: the recorded values are float64 results of the same formulas.
"""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.schedulers import (
    bolt_on_warmup,
    clip_factor_for_update,
    clip_warmup_factor,
    learning_rate_at,
    learning_rate_curve,
    scheduler_problems,
)
from olmo_hf.training.token_clock import TokenClockLR

GOLDEN = Path(__file__).parent.parent / "golden" / "07_schedulers"
CASES = json.loads((GOLDEN / "schedulers.json").read_text())


def args_of(recorded):
    return SchedulerArgs(
        name=recorded["name"],
        units=recorded["units"],
        warmup=recorded["t_warmup"],
        t_max=recorded["t_max"],
        alpha_f=recorded["alpha_f"],
        warmup_min_lr=recorded["warmup_min_lr"],
        grad_clip_warmup=recorded["grad_clip_warmup_steps"],
        grad_clip_warmup_factor=recorded["grad_clip_warmup_factor"],
    )


def exactly(expected):
    return pytest.approx(expected, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_recorded_values(number):
    case = CASES[number]
    args = args_of(case["scheduler"])

    def inner(current):
        return learning_rate_at(args, peak_lr=case["initial_lr"], current=current, max_=case["max"])

    assert [inner(current) for current in case["at"]] == exactly(case["lr"])
    factors = [clip_warmup_factor(args, current) for current in case["at"]]
    assert factors == exactly(case["max_grad_norm_initial_1"])
    assert [1.05 * factor for factor in factors] == exactly(case["max_grad_norm_ratio_initial_1_05"])
    if case["bolt_on"] is not None:
        bolt = case["bolt_on"]
        values = [
            bolt_on_warmup(inner, current=current, start=bolt["warmup_start"], end=bolt["warmup_end"])
            for current in bolt["at"]
        ]
        assert values == exactly(bolt["lr"])


def test_the_record_covers_every_curve_of_the_original():
    names = {case["scheduler"]["name"] for case in CASES}
    assert len(CASES) == 63
    assert names | {"warmup_stable_decay"} == set(SchedulerArgs.__annotations__["name"].__args__)
    assert any(case["bolt_on"] for case in CASES)


@pytest.mark.parametrize("refused", json.loads((GOLDEN / "errors.json").read_text()))
def test_warmup_must_start_below_the_peak(refused):
    args = SchedulerArgs(warmup_min_lr=refused["warmup_min_lr"])
    with pytest.raises(ConfigError, match=r"training.scheduler.warmup_min_lr"):
        learning_rate_curve(args, peak_lr=refused["initial_lr"], max_steps=10, max_tokens=100)


PUBLISHED_7B = SchedulerArgs(units="tokens", warmup=8_388_608_000, t_max=5e12, warmup_min_lr=0.0)


@pytest.mark.parametrize(
    ("tokens", "lr", "digits"),
    [
        (0, 0.0, 12),
        (4_194_304_000, 1.5e-4, 12),
        (8_388_608_000, 3e-4, 12),
        (10**12, 2.74551e-4, 5e-6),
        (928_646 * 4_194_304, 6.1351e-5, 1e-5),
        (4 * 10**12, 5.58666e-5, 5e-6),
        (5 * 10**12, 3e-5, 12),
        (6 * 10**12, 3e-5, 12),
    ],
)
def test_published_7b_schedule(tokens, lr, digits):
    # The figures are rounded to the digits given, hence their tolerance.
    tolerance = 1e-12 if digits == 12 else digits
    value = learning_rate_at(PUBLISHED_7B, peak_lr=3e-4, current=tokens, max_=4 * 10**12)
    assert value == pytest.approx(lr, rel=tolerance, abs=0.0)


def test_bolt_on_in_tokens():
    curve = learning_rate_curve(
        PUBLISHED_7B, peak_lr=3e-4, max_steps=10, max_tokens=4 * 10**12, bolt_on_start=10**12, bolt_on_length=10**10
    )
    plain = learning_rate_curve(PUBLISHED_7B, peak_lr=3e-4, max_steps=10, max_tokens=4 * 10**12)
    end = 1_010_000_000_000
    assert curve(7, 10**12) == 0.0
    assert curve(7, 9 * 10**11) == 0.0
    assert curve(7, 1_005_000_000_000) == exactly(plain(7, end) / 2)
    assert curve(7, end) == exactly(plain(7, end))
    assert abs(curve(7, end) - curve(7, end - 1)) < 1e-9
    assert curve(7, end + 10**11) == plain(7, end + 10**11)


def test_bolt_on_in_steps_does_not_look_at_tokens():
    args = SchedulerArgs(warmup=5)
    curve = learning_rate_curve(args, peak_lr=1.0, max_steps=100, max_tokens=1, bolt_on_start=30, bolt_on_length=10)
    assert curve(35, 10**12) == exactly(learning_rate_at(args, peak_lr=1.0, current=40, max_=100) / 2)


@pytest.mark.parametrize("shape", ["linear", "cosine", "one_minus_sqrt"])
def test_warmup_stable_decay(shape):
    args = SchedulerArgs(
        name="warmup_stable_decay", warmup=10, warmup_min_lr=0.0, decay=20, alpha_f=0.1, decay_shape=shape
    )
    values = [learning_rate_at(args, peak_lr=1.0, current=s, max_=100) for s in range(121)]
    assert values[5] == exactly(0.5)
    assert values[10:81] == [1.0] * 71
    assert all(later < earlier for earlier, later in itertools.pairwise(values[80:101]))
    middle = {"linear": 0.55, "cosine": 0.55, "one_minus_sqrt": 0.1 + 0.9 * (1 - math.sqrt(0.5))}[shape]
    assert values[90] == exactly(middle)
    assert values[100:] == [exactly(0.1)] * 21


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "warmup_stable_decay"}, "needs the length of its final decay"),
        ({"name": "warmup_stable_decay", "decay": 0}, "expected the length of the final decay"),
        ({"name": "warmup_stable_decay", "decay": 950}, "longer than the schedule's 1000 steps"),
        ({"decay": 10}, "cosine_with_warmup has no final decay"),
        ({"decay_shape": "cosine"}, "cosine_with_warmup has no final decay"),
        ({"name": "inverse_sqrt_with_warmup", "warmup": 0}, "divides by it"),
        ({"name": "max_scheduler", "warmup": 0}, "divides by it"),
        ({"warmup": -1}, "expected 0 (no warm-up) or more"),
        ({"warmup": 0.03}, "counted in whole steps"),
        ({"t_max": 0.5}, "counted in whole steps"),
        ({"name": "constant", "t_max": 10}, "constant has no horizon"),
        ({"warmup_min_lr": 1e-3}, "less than `training.learning_rate` (0.001)"),
        ({"grad_clip_warmup": 10}, "grad_clip_warmup_factor: not given"),
        ({"grad_clip_warmup_factor": 2.0}, "grad_clip_warmup: not given"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, words):
    (problem,) = scheduler_problems(SchedulerArgs(**settings), peak_lr=1e-3, max_=1000)
    assert words in problem
    assert problem.startswith("training.scheduler.")


def test_the_constant_curve_has_no_warm_up_to_refuse():
    args = SchedulerArgs(name="constant", warmup_min_lr=1.0)
    assert scheduler_problems(args, peak_lr=1e-3, max_=10) == []


def test_clip_limits_follow_one_update_behind_and_start_unwarmed():
    args = SchedulerArgs(grad_clip_warmup=2, grad_clip_warmup_factor=3.0)
    found = [clip_factor_for_update(args, completed=done, after=done + 1) for done in range(5)]
    assert found == [1.0, 3.0, 3.0, 1.0, 1.0]


def test_clip_limits_without_the_lag_are_warmed_from_the_first_update_on():
    args = SchedulerArgs(grad_clip_warmup=2, grad_clip_warmup_factor=3.0, grad_clip_warmup_lags=False)
    found = [clip_factor_for_update(args, completed=done, after=done + 1) for done in range(5)]
    assert found == [3.0, 3.0, 1.0, 1.0, 1.0]


def optimizer_of(*groups):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in groups], lr=9.0)


def used_rates(optimizer, scheduler, count):
    """Runs `count` updates in the Trainer's order; the rate of each is read off the weight itself."""
    weight = optimizer.param_groups[0]["params"][0]
    rates = []
    for _ in range(count):
        before = weight.item()
        weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
        scheduler.step()
        rates.append(weight.item() - before)
    return rates


@pytest.mark.parametrize("units", ["steps", "tokens"])
def test_the_kth_update_uses_the_value_at_k(units):
    scale = 1 if units == "steps" else 64
    args = SchedulerArgs(units=units, warmup=3 * scale, warmup_min_lr=0.0)
    curve = learning_rate_curve(args, peak_lr=0.5, max_steps=10, max_tokens=640)
    optimizer = optimizer_of({})
    scheduler = TokenClockLR(optimizer, curve, tokens_per_step=64)
    assert scheduler.last_used_lrs == []
    rates = used_rates(optimizer, scheduler, 10)
    expected = [learning_rate_at(args, peak_lr=0.5, current=k * scale, max_=10 * scale) for k in range(1, 11)]
    assert expected[0] == pytest.approx(0.5 / 3)
    assert rates == pytest.approx(expected, abs=2e-7)  # read off a float32 weight of size 2
    assert scheduler.last_used_lrs == exactly([expected[-1]])
    assert (scheduler.completed_steps, scheduler.tokens_seen) == (10, 640)


def test_resuming_with_another_batch_size_and_peak_uses_the_new_configuration():
    args = SchedulerArgs(units="tokens", warmup=128, warmup_min_lr=0.0)
    old_curve = learning_rate_curve(args, peak_lr=0.5, max_steps=20, max_tokens=1280)
    optimizer = optimizer_of({})
    scheduler = TokenClockLR(optimizer, old_curve, tokens_per_step=64)
    used_rates(optimizer, scheduler, 10)
    saved_scheduler, saved_optimizer = scheduler.state_dict(), optimizer.state_dict()
    assert saved_scheduler == {"step": 10, "tokens_seen": 640}

    new_curve = learning_rate_curve(args, peak_lr=0.25, max_steps=15, max_tokens=1280)
    resumed = optimizer_of({})
    clock = TokenClockLR(resumed, new_curve, tokens_per_step=128)
    resumed.load_state_dict(saved_optimizer)
    assert resumed.param_groups[0]["lr"] != new_curve(11, 768)  # the checkpoint's rate, until the clock is loaded
    clock.load_state_dict(saved_scheduler)
    rates = used_rates(resumed, clock, 5)
    assert rates == pytest.approx([new_curve(k, 640 + 128 * (k - 10)) for k in range(11, 16)], abs=2e-7)
    assert clock.last_used_lrs == exactly([learning_rate_at(args, peak_lr=0.25, current=1280, max_=1280)])
    assert clock.tokens_seen == 1280


def test_state_is_plain_numbers(tmp_path):
    scheduler = TokenClockLR(optimizer_of({}), lambda step, tokens: 0.1, tokens_per_step=4)
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    assert torch.load(tmp_path / "scheduler.pt", weights_only=True) == scheduler.state_dict()
    assert json.loads(json.dumps(scheduler.state_dict())) == scheduler.state_dict()


def test_groups_keep_their_share_of_the_curve():
    optimizer = optimizer_of({}, {"lr_scale": 0.1})
    scheduler = TokenClockLR(optimizer, lambda step, tokens: 0.5 * step, tokens_per_step=4)
    used_rates(optimizer, scheduler, 3)
    assert scheduler.last_used_lrs == exactly([1.5, 0.15])
    assert scheduler.next_lrs == exactly([2.0, 0.2])
    assert [group["lr"] for group in optimizer.param_groups] == scheduler.next_lrs
    assert scheduler.get_last_lr() == scheduler.next_lrs


def test_started_in_the_middle_without_a_state():
    optimizer = optimizer_of({})
    scheduler = TokenClockLR(
        optimizer, lambda step, tokens: step + tokens / 1000, tokens_per_step=4, step=7, tokens_seen=100
    )
    assert optimizer.param_groups[0]["lr"] == exactly(8 + 0.104)
    scheduler.set_clock(step=9, tokens_seen=200)
    assert optimizer.param_groups[0]["lr"] == exactly(10 + 0.204)
