"""Rates against a clock that is moved by hand: every figure below is arithmetic."""

import pytest

from olmo_hf.callbacks.args import SpeedMonitorArgs
from olmo_hf.callbacks.speed_monitor import PHASES, SpeedMonitor

TOKENS = 1000  # per step


def one_step(monitor, clock, arguments, state, control, *, data=0.1, compute=0.3, optimizer=0.1) -> None:
    clock.wait(data)
    monitor.on_step_begin(arguments, state, control)
    clock.wait(compute)
    monitor.on_pre_optimizer_step(arguments, state, control)
    clock.wait(optimizer)
    monitor.on_optimizer_step(arguments, state, control)
    state.global_step += 1
    state.num_input_tokens_seen += TOKENS
    monitor.on_step_end(arguments, state, control)


@pytest.fixture
def monitor(clock, arguments, state, control) -> SpeedMonitor:
    monitor = SpeedMonitor(SpeedMonitorArgs(window_size=4, peak_flops=1e6), flops_per_token=100, clock=clock)
    monitor.on_train_begin(arguments, state, control)
    return monitor


def test_nothing_but_totals_before_the_second_step(monitor, clock, arguments, state, control) -> None:
    one_step(monitor, clock, arguments, state, control)
    metrics = monitor.collect_metrics(state)
    assert metrics["throughput/total_tokens"] == TOKENS
    assert metrics["throughput/total_training_Gflops"] == pytest.approx(1e-4)
    assert "throughput/device/tokens_per_second" not in metrics


def test_rates_and_utilisation(monitor, clock, arguments, state, control) -> None:
    one_step(monitor, clock, arguments, state, control, compute=60.0)  # compiles: left out
    for _ in range(2):
        one_step(monitor, clock, arguments, state, control)
    metrics = monitor.collect_metrics(state)
    assert metrics["throughput/device/tokens_per_second"] == pytest.approx(2000)  # 1000 tokens in 0.5 s
    assert metrics["throughput/tokens_per_second"] == pytest.approx(2000)
    assert metrics["throughput/device/batches_per_second"] == pytest.approx(2)
    assert metrics["throughput/device/model_flops_per_second"] == pytest.approx(2e5)
    assert metrics["throughput/device/mfu"] == pytest.approx(0.2)
    assert metrics["throughput/seconds_left"] == pytest.approx(7 * 0.5)


def test_saves_and_evaluations_are_left_out_and_logging_is_not(monitor, clock, arguments, state, control) -> None:
    one_step(monitor, clock, arguments, state, control)
    one_step(monitor, clock, arguments, state, control)
    clock.wait(0.5)
    monitor.on_log(arguments, state, control, logs={"train/CrossEntropyLoss": 1.0})
    clock.wait(100)
    monitor.on_log(arguments, state, control, logs={"eval/c4/Perplexity": 1.0})
    clock.wait(1000)
    monitor.on_evaluate(arguments, state, control)
    clock.wait(10_000)
    monitor.on_save(arguments, state, control)
    one_step(monitor, clock, arguments, state, control)
    metrics = monitor.collect_metrics(state)
    assert metrics["throughput/tokens_per_second"] == pytest.approx(2 * TOKENS / (0.5 + 0.5 + 0.5))
    assert metrics["throughput/time_share/evaluation"] == pytest.approx(1100 / 11_102)
    assert metrics["throughput/time_share/checkpoint"] == pytest.approx(10_000 / 11_102)
    assert sum(metrics[f"throughput/time_share/{phase}"] for phase in PHASES) == pytest.approx(1)


def test_window_forgets_old_steps(monitor, clock, arguments, state, control) -> None:
    for compute in (0.3, 99.8, 99.8, 0.8, 0.8, 0.8, 0.8):
        one_step(monitor, clock, arguments, state, control, compute=compute)
    assert monitor.collect_metrics(state)["throughput/tokens_per_second"] == pytest.approx(1000)


def test_shares_are_those_since_the_last_log(monitor, clock, arguments, state, control) -> None:
    one_step(monitor, clock, arguments, state, control, data=50)
    monitor.collect_metrics(state)
    one_step(monitor, clock, arguments, state, control, data=0.5, compute=0.3, optimizer=0.2)
    metrics = monitor.collect_metrics(state)
    assert metrics["throughput/time_share/data"] == pytest.approx(0.5)
    assert metrics["throughput/time_share/forward_backward"] == pytest.approx(0.3)
    assert metrics["throughput/time_share/optimizer"] == pytest.approx(0.2)


def test_tokens_of_a_resumed_run_are_not_taken_for_speed(monitor, clock, arguments, state, control) -> None:
    state.global_step, state.num_input_tokens_seen = 500, 500 * TOKENS
    for _ in range(3):
        one_step(monitor, clock, arguments, state, control)
    assert monitor.collect_metrics(state)["throughput/tokens_per_second"] == pytest.approx(2000)


def test_without_flops_there_is_no_mfu_and_with_a_last_step_the_time_left_follows_it(
    clock, arguments, state, control
) -> None:
    monitor = SpeedMonitor(SpeedMonitorArgs(), flops_per_token=None, last_step=5, clock=clock)
    monitor.on_train_begin(arguments, state, control)
    for _ in range(3):
        one_step(monitor, clock, arguments, state, control)
    metrics = monitor.collect_metrics(state)
    assert not [name for name in metrics if "mfu" in name or "flops" in name.lower()]
    assert metrics["throughput/seconds_left"] == pytest.approx(1.0)


def test_on_a_cpu_the_peak_is_measured(clock, arguments, state, control) -> None:
    monitor = SpeedMonitor(SpeedMonitorArgs(), flops_per_token=100, clock=clock)
    monitor.on_train_begin(arguments, state, control)
    for _ in range(2):
        one_step(monitor, clock, arguments, state, control)
    assert 0 < monitor.collect_metrics(state)["throughput/device/mfu"] < 1
