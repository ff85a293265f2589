from dataclasses import replace
from pathlib import Path

import pytest

from olmo_hf.callbacks.args import (
    CallbacksArgs,
    CancellationArgs,
    DataIndicesArgs,
    LossSpikeArgs,
    ProfilerArgs,
    SpeedMonitorArgs,
    callbacks_problems,
)
from olmo_hf.callbacks.build import build_callbacks
from olmo_hf.callbacks.cancellation import Cancellation
from olmo_hf.callbacks.evaluation import EvaluationSchedule
from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs, TrainingArgs
from olmo_hf.training.batch_plan import BatchPlan, plan_batches


@pytest.fixture
def plan() -> BatchPlan:
    training = TrainingArgs(max_duration=10, global_train_batch_size=2, per_device_train_batch_size=2)
    return plan_batches(training, world_size=1, sequence_length=8, num_instances=100)


def names(args: CallbacksArgs, plan: BatchPlan, tmp_path: Path, evaluates: bool = False) -> list[str]:
    callbacks = build_callbacks(args, run_dir=tmp_path, plan=plan, evaluates=evaluates)
    return [type(callback).__name__ for callback in callbacks]


def test_what_is_on_by_default_and_in_which_order(plan: BatchPlan, tmp_path: Path) -> None:
    assert names(CallbacksArgs(), plan, tmp_path, evaluates=True) == [
        "Memory",
        "GarbageCollector",
        "Heartbeat",
        "MetricsFile",
        "Console",
        "LossSpike",
        "EvaluationSchedule",
        "Cancellation",
        "DataIndices",
        "SpeedMonitor",
    ]


def test_null_turns_a_feature_off_and_the_metrics_file_stays(plan: BatchPlan, tmp_path: Path) -> None:
    nothing = CallbacksArgs(
        speed_monitor=None,
        data_indices=None,
        console=None,
        garbage_collector=None,
        cancellation=None,
        loss_spike=None,
        memory=None,
        heartbeat=None,
    )
    assert names(nothing, plan, tmp_path) == ["MetricsFile"]
    assert names(replace(nothing, profiler=ProfilerArgs()), plan, tmp_path) == ["MetricsFile", "Profiler"]


def test_all_problems_at_once_each_with_key_value_and_remedy(plan: BatchPlan, tmp_path: Path) -> None:
    wrong = CallbacksArgs(
        speed_monitor=SpeedMonitorArgs(window_size=0, peak_flops=-1.0),
        data_indices=DataIndicesArgs(flush_steps=0),
        cancellation=CancellationArgs(early_stopping_factor=1.0),
        loss_spike=LossSpikeArgs(min_steps=200),
    )
    with pytest.raises(ConfigError) as caught:
        build_callbacks(wrong, run_dir=tmp_path, plan=plan, evaluates=False)
    assert [problem.split()[0] for problem in caught.value.problems] == [
        "callbacks.speed_monitor.window_size",
        "callbacks.speed_monitor.peak_flops",
        "callbacks.data_indices.flush_steps",
        "callbacks.cancellation.early_stopping_factor",
        "callbacks.loss_spike.min_steps",
    ]
    assert "is 0, but must be at least 1; give a larger number, or `callbacks.data_indices: null`" in str(caught.value)
    assert callbacks_problems(CallbacksArgs()) == []


def test_evaluations_at_their_interval_and_at_the_end(arguments, state, control) -> None:
    schedule = EvaluationSchedule(4, last_step=10)
    asked = []
    for step in range(1, 11):
        control._new_step()
        state.global_step = step
        schedule.on_step_end(arguments, state, control)
        if control.should_evaluate:
            asked.append(step)
    assert asked == [4, 8, 10]


def test_early_stopping_waits_for_a_warm_up_in_tokens(tmp_path: Path) -> None:
    training = TrainingArgs(
        max_duration=100,
        global_train_batch_size=2,
        per_device_train_batch_size=2,
        scheduler=SchedulerArgs(units="tokens", warmup=160),
    )
    plan = plan_batches(training, world_size=1, sequence_length=8, num_instances=100)
    callbacks = build_callbacks(CallbacksArgs(), run_dir=tmp_path, plan=plan, evaluates=False)
    (cancellation,) = [callback for callback in callbacks if isinstance(callback, Cancellation)]
    assert cancellation._early_stopping_after_steps == 10, "160 tokens at 16 a step"


def test_rollbacks_need_every_step_logged(tmp_path: Path) -> None:
    training = TrainingArgs(
        max_duration=100, global_train_batch_size=2, per_device_train_batch_size=2, logging_steps="64T"
    )
    plan = plan_batches(training, world_size=1, sequence_length=8, num_instances=100)
    wanted = CallbacksArgs(loss_spike=LossSpikeArgs(max_rollbacks=1))
    with pytest.raises(ConfigError, match=r"max_rollbacks is 1, but training\.logging_steps comes to 4 steps"):
        build_callbacks(wanted, run_dir=tmp_path, plan=plan, evaluates=False)
