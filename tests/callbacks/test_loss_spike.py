import math
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.callbacks.args import LossSpikeArgs
from olmo_hf.callbacks.json_lines import read_json_lines
from olmo_hf.callbacks.loss_spike import LossSpike, robust_z_score, spike_instances_path
from olmo_hf.data.order import DataPosition


class Recorder(list):
    def __call__(self, state, name, **details) -> None:
        assert name == "loss_spike"
        self.append((state.global_step, details))


def spike_callback(record: Recorder, run_dir: Path = Path("nowhere"), **options) -> LossSpike:
    return LossSpike(LossSpikeArgs(**options), record, run_dir=run_dir, rank=0)


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
    callback = spike_callback(record)
    log(callback, arguments, state, control, [*usual(100), 6.0, 5.5, 5.0, 4.0, *usual(50, 1), 6.0])
    assert spikes(record) == [101, 155]
    assert record[0][1]["loss"] == 6.0
    assert record[0][1]["usual"] == pytest.approx(3, abs=0.05)
    assert record[0][1]["deviations"] > 30


def test_noise_and_a_falling_loss_are_no_spikes(arguments, state, control) -> None:
    record = Recorder()
    falling = 2 + 8 * np.exp(-np.arange(3000) / 300) + np.random.default_rng(3).normal(0, 0.04, 3000)
    log(spike_callback(record), arguments, state, control, falling)
    assert spikes(record) == []


def test_nan_is_a_spike_and_does_not_spoil_the_window(arguments, state, control) -> None:
    record = Recorder()
    log(spike_callback(record), arguments, state, control, [*usual(50), math.nan, *usual(50, 1), 6.0])
    assert spikes(record) == [51, 102]


def test_nothing_before_there_is_something_to_compare_with(arguments, state, control) -> None:
    record = Recorder()
    log(spike_callback(record, min_steps=10), arguments, state, control, [3.0, 3.1, 9.0, 2.9, 3.0])
    assert spikes(record) == []


def test_a_level_that_stays_becomes_the_usual_one(arguments, state, control) -> None:
    record = Recorder()
    callback = spike_callback(record, window_steps=40, min_steps=20)
    log(callback, arguments, state, control, [*usual(60), *(usual(200, 1) + 2), 9.0])
    assert spikes(record) == [61, 261]


def test_the_window_survives_a_restart(arguments, state, control) -> None:
    record = Recorder()
    first = spike_callback(record)
    log(first, arguments, state, control, usual(100))
    second = spike_callback(record)
    second.load_state_dict(first.state_dict())
    log(second, arguments, state, control, [6.0])
    assert spikes(record) == [101]


def test_the_instances_of_a_spike_are_kept_whatever_is_trained_afterwards(tmp_path, arguments, state, control) -> None:
    record = Recorder()
    callback = spike_callback(record, tmp_path, min_steps=10)
    log(callback, arguments, state, control, usual(20))
    for step in (21, 22):
        callback.on_instances(state, [step, step + 100])
        state.global_step = step
    callback.on_log(arguments, state, control, logs={"train/CrossEntropyLoss": 9.0})
    (row,) = read_json_lines(spike_instances_path(tmp_path, 0))
    assert row["step"] == 22
    assert row["instances"] == {"21": [21, 121], "22": [22, 122]}


def test_going_back_is_wanted_once_a_spike_and_not_too_often(arguments, state, control) -> None:
    record: list[tuple[str, dict]] = []
    callback = LossSpike(
        LossSpikeArgs(max_rollbacks=2),
        lambda state, name, **details: record.append((name, details)),
        run_dir=Path("nowhere"),
        rank=0,
    )
    wanted = []
    for seed in range(3):
        before = callback.state_dict()
        log(callback, arguments, state, control, usual(40, seed) if seed == 0 else [])
        before = callback.state_dict() if seed == 0 else before
        log(callback, arguments, state, control, [9.0])
        wanted.append(callback.wants_to_go_back())
        assert not callback.wants_to_go_back(), "asked again, it is said already"
        if wanted[-1]:
            callback.load_state_dict(before)
            callback.on_gone_back(state, state.global_step + 5, DataPosition(0, 80))
        else:
            break
    assert wanted == [True, True, False]
    rollbacks = [details for name, details in record if name == "rollback"]
    assert [one["count"] for one in rollbacks] == [1, 2]
    assert rollbacks[0]["position"] == {"epoch": 0, "instances": 80}
    assert rollbacks[0]["passed_over_batches"] == 5
    assert callback.state_dict()["rollbacks"] == 2


def test_without_a_checkpoint_it_is_said_and_the_run_goes_on(arguments, state, control, caplog) -> None:
    names: list[str] = []
    callback = LossSpike(
        LossSpikeArgs(max_rollbacks=1), lambda state, name, **_: names.append(name), run_dir=Path("nowhere"), rank=0
    )
    callback.on_gone_back(state, 7, None)
    assert names == ["rollback_impossible"]
    assert "no whole checkpoint before step 7" in caplog.text
    assert callback.state_dict()["rollbacks"] == 0
