"""When a checkpoint is due, and what it is."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from olmo_hf.errors import ConfigError
from olmo_hf.training.durations import Interval, SaveIntervals, parse_duration, save_interval
from olmo_hf.training.flow import NAMES, SaveSchedule, save_intervals, what_to_save


@pytest.mark.parametrize(
    ("due", "sharded", "expected"),
    [
        pytest.param({"permanent"}, True, ("sharded", True), id="sharded"),
        pytest.param({"permanent"}, False, ("unsharded", True), id="nothing-to-shard"),
        pytest.param({"ephemeral"}, True, ("ephemeral", True), id="ephemeral"),
        pytest.param({"permanent", "ephemeral"}, True, ("sharded", True), id="permanent-wins"),
        pytest.param({"unsharded"}, True, ("unsharded", False), id="a-model"),
        pytest.param({"unsharded", "ephemeral"}, True, ("unsharded", True), id="a-model-to-go-on-from"),
        pytest.param(set(), True, ("sharded", True), id="asked-for-by-somebody-else"),
    ],
)
def test_what_is_saved(due: Any, sharded: bool, expected: tuple[str, bool]) -> None:
    assert what_to_save(due, step=6, final=False, sharded=sharded, unsharded_optimizer=False) == expected


def test_the_last_one_is_a_model_to_go_on_from_and_the_first_gives_way() -> None:
    for count in range(4):
        for due in itertools.combinations(NAMES, count):
            assert what_to_save(set(due), step=6, final=True, sharded=True, unsharded_optimizer=False) == (
                "unsharded",
                True,
            )
            assert what_to_save(set(due), step=0, final=False, sharded=True, unsharded_optimizer=False) == (
                "ephemeral",
                True,
            )


def test_intervals_are_steps_tokens_or_minutes() -> None:
    units = {"tokens_per_step": 100, "steps_per_epoch": 7, "key": "training.save_interval"}
    assert save_interval(5, **units) == Interval(steps=5)
    assert save_interval("1e3T", **units) == Interval(steps=10)
    assert save_interval("2ep", **units) == Interval(steps=14)
    assert save_interval("30min", **units) == Interval(minutes=30)
    assert save_interval(None, **units) is None
    with pytest.raises(ConfigError, match="minutes must be whole"):
        save_interval("0.5min", **units)
    with pytest.raises(ConfigError, match=r"training\.max_duration is '30min'"):
        parse_duration("30min")


class Clock:
    """Seconds that are set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def steps_due(intervals: SaveIntervals, clock: Clock, seconds_per_step: float, steps: int) -> dict[int, set[str]]:
    schedule, control = SaveSchedule(clock), TrainerControl()
    args: Any = SimpleNamespace(save_intervals=intervals, stop_step=None)
    state = TrainerState(max_steps=10_000)
    schedule.on_train_begin(args, state, control)
    found: dict[int, set[str]] = {}
    for step in range(1, steps + 1):
        clock.now += seconds_per_step
        state.global_step, control.should_save = step, False
        schedule.on_step_end(args, state, control)
        assert control.should_save == bool(schedule.due)
        if schedule.due:
            found[step] = set(schedule.due)
    return found


def test_minutes_count_from_the_last_one_that_served() -> None:
    intervals = SaveIntervals(permanent=Interval(minutes=5), ephemeral=Interval(minutes=2))
    found = steps_due(intervals, Clock(), 60.0, 11)
    assert found == {
        2: {"ephemeral"},
        4: {"ephemeral"},
        5: {"permanent"},
        7: {"ephemeral"},
        9: {"ephemeral"},
        10: {"permanent"},
    }


def test_steps_need_no_clock() -> None:
    intervals = SaveIntervals(permanent=Interval(steps=4), unsharded=Interval(steps=6))
    found = steps_due(intervals, Clock(), 0.0, 12)
    assert found == {4: {"permanent"}, 6: {"unsharded"}, 8: {"permanent"}, 12: {"permanent", "unsharded"}}


def disagreeing_clocks(rank: int) -> list[int]:
    """Rank 1's clock stands still; rank 0's goes a minute a step."""
    return sorted(steps_due(SaveIntervals(permanent=Interval(minutes=3)), Clock(), 60.0 * (rank == 0), 9))


def test_the_clock_of_rank_0_decides_for_all(two_ranks: Any) -> None:
    assert two_ranks(disagreeing_clocks) == [[3, 6, 9], [3, 6, 9]]


def test_without_a_yaml_hugging_faces_arguments_rule() -> None:
    def arguments(**values: Any) -> Any:
        return SimpleNamespace(save_intervals=None, **values)

    assert save_intervals(arguments(save_strategy="steps", save_steps=7)) == SaveIntervals(permanent=Interval(steps=7))
    assert save_intervals(arguments(save_strategy="no", save_steps=7)) == SaveIntervals()
