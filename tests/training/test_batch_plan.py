"""The plan of a run: sizes that divide or are refused, lengths on both clocks, and what is printed."""

import dataclasses

import pytest

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs, TrainingArgs
from olmo_hf.training.batch_plan import Length, describe, plan_batches, plan_warnings
from olmo_hf.training.durations import Interval, SaveIntervals

RUN = {"world_size": 2, "sequence_length": 32, "num_instances": 203}


def training(**changes):
    settings = {"max_duration": 60, "global_train_batch_size": 8, "per_device_train_batch_size": 2}
    return TrainingArgs(**(settings | changes))


def test_sizes_and_lengths():
    plan = plan_batches(training(save_interval="1000T"), **RUN, eval_interval=20)
    assert plan.gradient_accumulation_steps == 2
    assert plan.tokens_per_step == 256
    assert plan.steps_per_epoch == 25  # 203 // 8: the last three instances make no batch
    assert (plan.max_steps, plan.max_tokens, plan.stop_step) == (60, 60 * 256, 60)
    assert plan.save_intervals == SaveIntervals(permanent=Interval(steps=4))
    assert plan.eval_interval_steps == 20


def test_batch_defaults_to_one_pass_of_every_device():
    plan = plan_batches(training(global_train_batch_size=None), **RUN)
    assert (plan.global_train_batch_size, plan.gradient_accumulation_steps) == (4, 1)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("per_device", [1, 2])
def test_the_split_does_not_change_what_a_step_is(world_size, per_device):
    plan = plan_batches(
        training(per_device_train_batch_size=per_device), world_size=world_size, sequence_length=32, num_instances=203
    )
    assert plan.gradient_accumulation_steps * world_size * per_device == 8
    assert (plan.tokens_per_step, plan.steps_per_epoch, plan.max_steps) == (256, 25, 60)


def test_a_batch_that_does_not_divide_names_numbers_and_neighbours():
    with pytest.raises(ConfigError) as caught:
        plan_batches(training(global_train_batch_size=10), **RUN)
    message = str(caught.value)
    assert "training.global_train_batch_size is 10" in message
    assert "2 devices x per_device_train_batch_size 2 = 4" in message
    assert "set global_train_batch_size to 8 or 12" in message
    assert "per_device_train_batch_size to 1 or 5" in message
    for remedy in ({"global_train_batch_size": 12}, {"per_device_train_batch_size": 5, "global_train_batch_size": 10}):
        plan_batches(training(**remedy), **RUN)  # what is recommended works


@pytest.mark.parametrize("length", ["1e18ep", "9e23T", 2**60])
def test_a_length_that_nobody_can_count_is_refused(length):
    with pytest.raises(ConfigError, match="longer than any run"):
        plan_batches(training(max_duration=length), **RUN)


def test_a_batch_smaller_than_one_pass_is_refused():
    with pytest.raises(ConfigError, match="set global_train_batch_size to 16, or per_device_train_batch_size to 4"):
        plan_batches(training(per_device_train_batch_size=8), **RUN)
    with pytest.raises(ConfigError, match="multiple of 3"):
        plan_batches(training(), **(RUN | {"world_size": 3}))


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as caught:
        plan_batches(
            training(max_duration=None, stop_at=0, global_train_batch_size=10), **(RUN | {"num_instances": 9})
        )
    assert len(caught.value.problems) == 4
    assert "9 instances, fewer than one batch of 10" in str(caught.value)


@pytest.mark.parametrize("key", ["per_device_train_batch_size", "global_train_batch_size"])
def test_sizes_must_be_positive(key):
    with pytest.raises(ConfigError, match=f"training.{key} is 0"):
        plan_batches(training(**{key: 0}), **RUN)


@pytest.mark.parametrize(
    ("stops", "step", "expected"),
    [
        ({}, 0, 60),  # the original would take ten more steps
        ({"stop_at": 33}, 0, 33),
        ({"stop_after": 20}, 0, 20),
        ({"stop_after": 20}, 30, 50),
        ({"stop_after": 50}, 30, 60),
        ({"stop_at": 40, "stop_after": 20}, 30, 40),
        ({"stop_at": 100}, 0, 60),
    ],
)
def test_stop_step(stops, step, expected):
    assert plan_batches(training(**stops), **RUN, step=step, tokens_seen=step * 256).stop_step == expected


def test_run_in_tokens_after_a_change_of_batch_size():
    plan = plan_batches(training(max_duration="1280T", global_train_batch_size=4), **RUN, step=10, tokens_seen=640)
    assert (plan.max_steps, plan.max_tokens) == (15, 1280)


def test_published_7b_lengths():
    # OLMo-2 7B stage 1: 1024 instances of 4096 tokens, warm-up 8,388,608,000 tokens = 2000 steps, horizon 5e12.
    scheduler = SchedulerArgs(units="tokens", warmup=8_388_608_000, t_max=5e12, warmup_min_lr=0.0)
    args = TrainingArgs(
        max_duration="1ep", global_train_batch_size=1024, per_device_train_batch_size=2, scheduler=scheduler
    )
    plan = plan_batches(args, world_size=512, sequence_length=4096, num_instances=928_646 * 1024)
    assert plan.tokens_per_step == 4_194_304
    assert plan.max_steps == 928_646
    assert plan.warmup == Length(2000, 8_388_608_000)
    assert plan.horizon == Length(1_192_093, 5 * 10**12)
    warning = plan_warnings(plan)
    assert len(warning) == 1
    assert "floor at step 1,192,093" in warning[0]
    assert "after the run ends at step 928,646" in warning[0]


def test_every_length_is_described_in_steps_and_tokens():
    rows = dict(describe(plan_batches(training(stop_at=33), **RUN)))
    assert rows["batch"] == "8 instances = 256 tokens (2 devices x 2 instances x 2 accumulation steps)"
    assert rows["run"] == "60 steps = 15,360 tokens"
    assert rows["this launch stops at"] == "33 steps = 8,448 tokens"
    assert rows["save every"] == "1,000 steps = 256,000 tokens"
    for label, text in rows.items():
        assert text == "never" or "tokens" in text or label == "note", label


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scheduler": SchedulerArgs(warmup=5, t_max=40)}, "floor at step 40"),
        ({"scheduler": SchedulerArgs(warmup=60)}, "never reaches its peak"),
        ({"scheduler": SchedulerArgs(warmup=5), "stop_after": 3}, "stops at step 3 of 60"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_warned_about(changes, words):
    (warning,) = plan_warnings(plan_batches(training(**changes), **RUN))
    assert words in warning


def test_warnings_are_part_of_the_table():
    rows = describe(plan_batches(training(scheduler=SchedulerArgs(warmup=5), stop_after=3), **RUN))
    assert [text for label, text in rows if label == "note"] == [
        "this launch stops at step 3 of 60 (training.stop_at, stop_after); the schedule is that of the whole run"
    ]


def test_no_warning_where_lengths_agree():
    for name in ("cosine_with_warmup", "constant", "inverse_sqrt_with_warmup"):
        plan = plan_batches(training(scheduler=SchedulerArgs(name=name, warmup=5)), **RUN)
        assert plan_warnings(plan) == []


def test_the_plan_is_frozen():
    plan = plan_batches(training(), **RUN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.max_steps = 70
