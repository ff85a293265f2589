"""The picture of a schedule: its points are those the run will use, and it can be drawn for every curve."""

import struct
from typing import get_args

import pytest

from olmo_hf.report.schedule import draw_schedule, schedule_points
from olmo_hf.training.args import SchedulerArgs, TrainingArgs
from olmo_hf.training.batch_plan import plan_batches
from olmo_hf.training.schedulers import bolt_on_warmup, learning_rate_at

NAMES = get_args(SchedulerArgs.__annotations__["name"])


def plan_of(scheduler, *, step=0, tokens_seen=0, **changes):
    training = TrainingArgs(
        **{"max_duration": 300, "global_train_batch_size": 8, "scheduler": scheduler, "learning_rate": 1e-3} | changes
    )
    return plan_batches(
        training, world_size=1, sequence_length=32, num_instances=10_000, step=step, tokens_seen=tokens_seen
    )


@pytest.mark.parametrize("units", ["steps", "tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_points_are_the_rates_of_the_run(name, units):
    scale = 1 if units == "steps" else 256
    decay = 60 * scale if name == "warmup_stable_decay" else None
    scheduler = SchedulerArgs(name=name, units=units, warmup=30 * scale, decay=decay)
    steps, tokens, rates = schedule_points(scheduler, peak_lr=1e-3, plan=plan_of(scheduler))
    assert steps.tolist() == list(range(1, 301))
    assert tokens.tolist() == [256 * step for step in range(1, 301)]
    for step, rate in zip(steps, rates, strict=True):
        current = int(step) * scale
        assert rate == learning_rate_at(scheduler, peak_lr=1e-3, current=current, max_=300 * scale)


def test_corners_of_a_long_run_are_kept():
    scheduler = SchedulerArgs(name="warmup_stable_decay", warmup=777, decay=12_345)
    steps, _, rates = schedule_points(
        scheduler, peak_lr=1e-3, plan=plan_of(scheduler, max_duration=987_654, stop_at=123_456)
    )
    assert len(steps) < 2_100
    assert {1, 777, 123_456, 987_654 - 12_345, 987_654} <= set(steps.tolist())
    assert rates[steps == 987_654 - 12_345][0] == 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_every_curve_can_be_drawn(name, tmp_path):
    scheduler = SchedulerArgs(name=name, warmup=30, decay=60 if name == "warmup_stable_decay" else None)
    path = tmp_path / "schedule.png"
    draw_schedule(scheduler, peak_lr=1e-3, plan=plan_of(scheduler, stop_at=200), path=path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1170, 546)


@pytest.mark.parametrize("units", ["steps", "tokens"])
@pytest.mark.parametrize("name", NAMES)
def test_a_second_warm_up_is_drawn_from_where_this_launch_begins(name, units, tmp_path):
    """At step 100 after 12,800 tokens: half the batch of now."""
    scale = 1 if units == "steps" else 256
    decay = 60 * scale if name == "warmup_stable_decay" else None
    scheduler = SchedulerArgs(name=name, units=units, warmup=30 * scale, decay=decay)
    plan = plan_of(scheduler, step=100, tokens_seen=12_800)
    steps, tokens, rates = schedule_points(scheduler, peak_lr=1e-3, plan=plan, bolt_on=20 * scale)
    assert steps.tolist() == list(range(101, 301))
    assert tokens.tolist() == [12_800 + 256 * (step - 100) for step in range(101, 301)]
    start, horizon = (100, 300) if units == "steps" else (12_800, 12_800 + 200 * 256)

    def inner(current):
        return learning_rate_at(scheduler, peak_lr=1e-3, current=current, max_=horizon)

    for step, token, rate in zip(steps, tokens, rates, strict=True):
        current = int(step if units == "steps" else token)
        assert rate == bolt_on_warmup(inner, current=current, start=start, end=start + 20 * scale)
    assert rates[0] == pytest.approx(rates[19] / 20)
    draw_schedule(scheduler, peak_lr=1e-3, plan=plan, path=tmp_path / "lr.png", bolt_on=20 * scale, factors={"*": 2.0})
    assert (tmp_path / "lr.png").stat().st_size > 5_000
