"""Lengths of runs: every accepted form, every refusal, and the arithmetic of steps and tokens."""

import pytest

from olmo_hf.errors import ConfigError
from olmo_hf.training.durations import (
    Duration,
    duration_in_steps,
    duration_in_tokens,
    interval_in_steps,
    parse_duration,
)

PER_STEP = {"tokens_per_step": 256, "steps_per_epoch": 70}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (300, Duration(300, "steps")),
        ("300", Duration(300, "steps")),
        ("1_000", Duration(1000, "steps")),
        ("739_328", Duration(739_328, "steps")),
        (5e3, Duration(5000, "steps")),
        ("5e3", Duration(5000, "steps")),
        ("1ep", Duration(1, "epochs")),
        (" 2ep ", Duration(2, "epochs")),
        ("2e12T", Duration(2 * 10**12, "tokens")),
        ("5e12T", Duration(5 * 10**12, "tokens")),
        ("8388608000T", Duration(8_388_608_000, "tokens")),
        ("1_000_000T", Duration(1_000_000, "tokens")),
        # A float would lose the last digit; what is written is what is meant.
        ("9007199254740993T", Duration(9_007_199_254_740_993, "tokens")),
    ],
)
def test_every_form_is_read(value, expected):
    assert parse_duration(value) == expected


@pytest.mark.parametrize("value", ["", "ep", "T", "ten", "5 steps", "1e3t", "0x10", True, None, [3], "nan", "infT"])
def test_nonsense_is_refused_by_key_value_and_remedy(value):
    with pytest.raises(ConfigError) as caught:
        parse_duration(value, key="training.save_interval")
    message = str(caught.value)
    assert "training.save_interval" in message
    assert repr(value) in message
    assert "whole" in message or '"2ep"' in message


@pytest.mark.parametrize("value", [0, -3, "0ep", "-1e6T"])
def test_lengths_below_one_are_refused(value):
    with pytest.raises(ConfigError, match="at least 1"):
        parse_duration(value)


@pytest.mark.parametrize("value", ["1e99999999", "1e30T", "9" * 40])
def test_endless_lengths_are_refused_at_once(value):
    with pytest.raises(ConfigError, match="longer than any run"):
        parse_duration(value)


@pytest.mark.parametrize(("value", "unit"), [("1.5ep", "epochs"), (2.5, "steps"), ("0.5T", "tokens")])
def test_fractions_are_refused(value, unit):
    with pytest.raises(ConfigError, match=f"number of {unit} must be whole"):
        parse_duration(value)


def test_tokens_round_up_to_the_step_that_reaches_them():
    assert duration_in_steps("2560T", **PER_STEP) == 10
    assert duration_in_steps("2561T", **PER_STEP) == 11


def test_tokens_count_what_is_missing_after_a_change_of_batch_size():
    # 10 steps of 64 tokens, then 128 tokens a step: 640 + 5 * 128 = 1280.
    assert duration_in_steps("1280T", tokens_per_step=128, steps_per_epoch=9, step=10, tokens_seen=640) == 15
    assert duration_in_tokens("1280T", tokens_per_step=128, steps_per_epoch=9, step=10, tokens_seen=640) == 1280


def test_tokens_already_seen_need_no_further_step():
    assert duration_in_steps("100T", **PER_STEP, step=7, tokens_seen=7 * 256) == 7


def test_steps_and_epochs_in_both_units():
    assert duration_in_steps(300, **PER_STEP) == 300
    assert duration_in_tokens(300, **PER_STEP) == 300 * 256
    assert duration_in_tokens(300, **PER_STEP, step=100, tokens_seen=5) == 5 + 200 * 256
    assert duration_in_tokens(300, **PER_STEP, step=400, tokens_seen=5) == 5
    assert duration_in_steps("2ep", **PER_STEP) == 140
    assert duration_in_tokens("2ep", **PER_STEP) == 140 * 256


def test_intervals():
    assert interval_in_steps(None, **PER_STEP, key="k") is None
    assert interval_in_steps(25, **PER_STEP, key="k") == 25
    assert interval_in_steps("1ep", **PER_STEP, key="k") == 70
    assert interval_in_steps("1e4T", **PER_STEP, key="k") == 40  # 39.06 steps, rounded up
    assert interval_in_steps("1T", **PER_STEP, key="k") == 1
    with pytest.raises(ConfigError, match=r"evaluation\.interval"):
        interval_in_steps("often", **PER_STEP, key="evaluation.interval")
