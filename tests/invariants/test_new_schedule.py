"""Going on with another horizon, warm-up, peak or batch: the new configuration holds at once, and is told."""

from pathlib import Path

import pytest

from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.schedulers import learning_rate_at
from tests import runs
from tests.invariants.test_bad_numbers import rows_of
from tests.served import Ranks

OLD = {"units": "steps", "warmup": 4, "warmup_min_lr": 0.0, "alpha_f": 0.1}


@pytest.mark.parametrize("name", ["cosine_with_warmup", "linear_with_warmup"])
def test_horizon_warm_up_and_peak_are_those_of_the_new_launch(one: Ranks, tmp_path: Path, name: str) -> None:
    config = runs.write_run(tmp_path, max_duration=6, scheduler={"name": name, **OLD}, save_interval=None)
    one.run(config, "--training.stop_at=3")
    words = ("--training.max_duration=11", "--training.scheduler.warmup=6", "--training.learning_rate=0.003")
    text = one.run(config, *words, "--training.scheduler.alpha_f=0.2")
    for sentence in (
        "training.max_duration was 6 and is now 11",
        "training.scheduler.warmup was 4",
        "training.learning_rate was 0.01 and is now 0.003",
        "training.scheduler.alpha_f was 0.1 and is now 0.2",
    ):
        assert f"changed since the last launch: {sentence}" in text
    before, after = SchedulerArgs(name=name, **OLD), SchedulerArgs(name=name, **{**OLD, "warmup": 6, "alpha_f": 0.2})
    expected = {k: learning_rate_at(before, peak_lr=0.01, current=k, max_=6) for k in range(1, 4)}
    expected |= {k: learning_rate_at(after, peak_lr=0.003, current=k, max_=11) for k in range(4, 12)}
    assert {step: rate for step, (_, _, rate) in runs.losses(tmp_path / "run").items()} == expected


def test_a_finished_run_is_prolonged(one: Ranks, tmp_path: Path) -> None:
    scheduler = {"name": "linear_with_warmup", **OLD, "alpha_f": 0.0}
    config = runs.write_run(tmp_path, max_duration=5, scheduler=scheduler, save_interval=None)
    one.run(config)
    one.run(config, "--training.max_duration=10")
    rates = {step: rate for step, (_, _, rate) in runs.losses(tmp_path / "run").items()}
    assert rates[5] == 0.0
    args = SchedulerArgs(**scheduler)
    assert [rates[k] for k in range(6, 11)] == [
        learning_rate_at(args, peak_lr=0.01, current=k, max_=10) for k in range(6, 11)
    ]


def test_another_batch_size_goes_on_at_the_tokens_seen(one: Ranks, tmp_path: Path) -> None:
    scheduler = {"units": "tokens", "warmup": 128, "warmup_min_lr": 0.0, "t_max": 2048}
    config = runs.write_run(
        tmp_path, global_train_batch_size=4, max_duration="1280T", scheduler=scheduler, save_interval=None
    )
    one.run(config, "--training.stop_at=10")
    one.run(config, "--training.global_train_batch_size=8")
    rows = rows_of(tmp_path / "run")
    assert list(rows) == list(range(1, 16))
    assert rows[10]["throughput/total_tokens"] == 640
    assert rows[15]["throughput/total_tokens"] == 1280
    args = SchedulerArgs(**scheduler)
    for step, row in rows.items():
        tokens = 64 * step if step <= 10 else 640 + 128 * (step - 10)
        rate = learning_rate_at(args, peak_lr=0.01, current=tokens, max_=1280)
        assert row["optim/learning_rate_group0"] == rate, step


def test_saving_and_logging_in_tokens(one: Ranks, tmp_path: Path) -> None:
    config = runs.write_run(
        tmp_path, max_duration="1000T", save_interval="300T", save_interval_ephemeral=None, logging_steps="256T"
    )
    text = one.run(config)
    names = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert names == ["checkpoint-3", "checkpoint-6", "checkpoint-8"], "300 tokens are reached by three steps of 128"
    assert list(rows_of(tmp_path / "run")) == [2, 4, 6, 8]
    assert "3 steps = 384 tokens" in text
