import math

import numpy as np
import pytest

from olmo_hf.callbacks.args import LossSpikeArgs
from olmo_hf.callbacks.loss_spike import LossSpike, robust_z_score


class Recorder(list):
    def __call__(self, state, name, **details) -> None:
        assert name == "loss_spike"
        self.append((state.global_step, details))


def log(callback: LossSpike, arguments, state, control, losses) -> None:
    for loss in losses:
        state.global_step += 1
        callback.on_log(arguments, state, control, logs={"train/CrossEntropyLoss": float(loss)})


def spikes(record: Recorder) -> list[int]:
    return [step for step, _ in record]


def usual(count: int, seed: int = 0) -> np.ndarray:
    return 3 + np.random.default_rng(seed).normal(0, 0.05, count)


def test_score_is_that_of_a_normal_distribution_whatever_the_outliers() -> None:
    window = np.random.default_rng(0).normal(3, 0.05, 10_001)
    window[:100] = 99.0
    # One percent of outliers moves the median and the deviation by about a percent each.
    assert robust_z_score(3.5, window.tolist()) == pytest.approx(10, rel=0.05)


def test_score_at_its_edges() -> None:
    assert robust_z_score(1.0, [1.0, 1.0, 1.0]) == 0
    assert robust_z_score(2.0, [1.0, 1.0, 1.0]) == math.inf
    assert robust_z_score(0.5, [1.0, 1.0, 1.0]) == -math.inf
    assert robust_z_score(math.nan, [1.0, 2.0, 3.0]) == math.inf


def test_a_spike_is_marked_once_at_its_first_step(arguments, state, control) -> None:
    record = Recorder()
    callback = LossSpike(LossSpikeArgs(), record)
    log(callback, arguments, state, control, [*usual(100), 6.0, 5.5, 5.0, 4.0, *usual(50, 1), 6.0])
    assert spikes(record) == [101, 155]
    assert record[0][1]["loss"] == 6.0
    assert record[0][1]["usual"] == pytest.approx(3, abs=0.05)
    assert record[0][1]["deviations"] > 30


def test_noise_and_a_falling_loss_are_no_spikes(arguments, state, control) -> None:
    record = Recorder()
    falling = 2 + 8 * np.exp(-np.arange(3000) / 300) + np.random.default_rng(3).normal(0, 0.04, 3000)
    log(LossSpike(LossSpikeArgs(), record), arguments, state, control, falling)
    assert spikes(record) == []


def test_nan_is_a_spike_and_does_not_spoil_the_window(arguments, state, control) -> None:
    record = Recorder()
    log(LossSpike(LossSpikeArgs(), record), arguments, state, control, [*usual(50), math.nan, *usual(50, 1), 6.0])
    assert spikes(record) == [51, 102]


def test_nothing_before_there_is_something_to_compare_with(arguments, state, control) -> None:
    record = Recorder()
    log(LossSpike(LossSpikeArgs(min_steps=10), record), arguments, state, control, [3.0, 3.1, 9.0, 2.9, 3.0])
    assert spikes(record) == []


def test_a_level_that_stays_becomes_the_usual_one(arguments, state, control) -> None:
    record = Recorder()
    callback = LossSpike(LossSpikeArgs(window_steps=40, min_steps=20), record)
    log(callback, arguments, state, control, [*usual(60), *(usual(200, 1) + 2), 9.0])
    assert spikes(record) == [61, 261]


def test_the_window_survives_a_restart(arguments, state, control) -> None:
    record = Recorder()
    first = LossSpike(LossSpikeArgs(), record)
    log(first, arguments, state, control, usual(100))
    second = LossSpike(LossSpikeArgs(), record)
    second.load_state_dict(first.state_dict())
    log(second, arguments, state, control, [6.0])
    assert spikes(record) == [101]
