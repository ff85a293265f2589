"""Any schedule and any length, drawn at random: what holds for all of them, or a refusal in words."""

import itertools
import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.durations import duration_in_steps, duration_in_tokens, parse_duration, save_interval
from olmo_hf.training.schedulers import HORIZONLESS, bolt_on_warmup, learning_rate_at, learning_rate_curve

PEAK = 3e-4
NAMES = st.sampled_from(
    [
        "cosine_with_warmup",
        "linear_with_warmup",
        "inverse_sqrt_with_warmup",
        "max_scheduler",
        "constant",
        "constant_with_warmup",
        "cosine_linear_envelope",
        "warmup_stable_decay",
    ]
)
LENGTHS = st.integers(0, 10**13).map(float)
CURVES = st.builds(
    SchedulerArgs,
    name=NAMES,
    units=st.sampled_from(["steps", "tokens"]),
    warmup=LENGTHS,
    t_max=st.none() | LENGTHS.filter(bool),
    alpha_f=st.floats(0, 1),
    warmup_min_lr=st.none() | st.floats(0, 2 * PEAK),
    decay=st.none() | LENGTHS,
    decay_shape=st.sampled_from(["linear", "linear", "cosine", "one_minus_sqrt"]),
)


@settings(max_examples=300, deadline=None)
@given(
    args=CURVES,
    max_=st.integers(1, 10**13),
    places=st.lists(st.integers(0, 2 * 10**13), min_size=1, max_size=8),
)
def test_a_curve_is_refused_or_stays_between_nothing_and_its_peak(
    args: SchedulerArgs, max_: int, places: list[int]
) -> None:
    curve, problems = None, []
    try:
        curve = learning_rate_curve(args, peak_lr=PEAK, max_steps=max_, max_tokens=max_)
    except ConfigError as error:
        problems = error.problems
    assert all(sentence.startswith("training.scheduler.") for sentence in problems)
    assert (curve is None) == bool(problems)
    if curve is None:
        return
    for place in places:
        rate = curve(place, place)
        assert math.isfinite(rate)
        assert -1e-18 <= rate <= PEAK * (1 + 1e-12), "a rounding of float64 above the peak at most"


@settings(max_examples=200, deadline=None)
@given(
    name=NAMES,
    warmup=st.integers(1, 10**12),
    rest=st.integers(1, 10**12),
    alpha_f=st.floats(0, 1),
    places=st.lists(st.floats(0, 1), min_size=2, max_size=8),
)
def test_a_curve_rises_to_its_peak_then_falls_to_its_floor(
    name: str, warmup: int, rest: int, alpha_f: float, places: list[float]
) -> None:
    decay = {"decay": rest} if name == "warmup_stable_decay" else {}
    args = SchedulerArgs(name=name, warmup=warmup, alpha_f=alpha_f, warmup_min_lr=0.0, **decay)  # type: ignore[arg-type]
    end = warmup + rest

    def rate(place: float) -> float:
        return learning_rate_at(args, peak_lr=PEAK, current=place, max_=end)

    rising = [rate(round(warmup * share)) for share in sorted(places)]
    falling = [rate(warmup + round(rest * share)) for share in sorted(places)]
    for earlier, later in itertools.pairwise(rising):
        assert later >= earlier
    for earlier, later in itertools.pairwise(falling):
        assert later <= earlier * (1 + 1e-12)
    assert rate(warmup) == PEAK or math.isclose(rate(warmup), PEAK, rel_tol=1e-12)
    if name not in HORIZONLESS and name != "max_scheduler":
        assert rate(end) == alpha_f * PEAK
        assert rate(end + 1) == rate(10 * end) == alpha_f * PEAK


@settings(max_examples=200, deadline=None)
@given(start=st.integers(0, 10**12), length=st.integers(1, 10**12), share=st.floats(0, 1))
def test_a_second_warm_up_never_leads_above_the_curve_it_meets(start: int, length: int, share: float) -> None:
    args, end = SchedulerArgs(warmup=0, alpha_f=0.1), 4 * 10**12

    def inner(place: float) -> float:
        return learning_rate_at(args, peak_lr=PEAK, current=place, max_=end)

    place = start + round(length * share)
    rate = bolt_on_warmup(inner, current=place, start=start, end=start + length)
    assert 0.0 <= rate <= inner(start + length) * (1 + 1e-12)
    assert bolt_on_warmup(inner, current=start, start=start, end=start + length) == 0.0
    assert bolt_on_warmup(inner, current=start + length, start=start, end=start + length) == inner(start + length)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.integers(1, 10**15),
    tokens_per_step=st.integers(1, 10**8),
    step=st.integers(0, 10**7),
    tokens_seen=st.integers(0, 10**15),
)
def test_a_length_in_tokens_ends_at_the_first_step_that_reaches_it(
    tokens: int, tokens_per_step: int, step: int, tokens_seen: int
) -> None:
    here = {"tokens_per_step": tokens_per_step, "steps_per_epoch": 1, "step": step, "tokens_seen": tokens_seen}
    last = duration_in_steps(f"{tokens}T", **here)  # type: ignore[arg-type]
    at_the_end = tokens_seen + (last - step) * tokens_per_step
    assert last >= step
    assert at_the_end >= tokens
    assert last == step or at_the_end - tokens_per_step < tokens, "one step fewer would not do"
    assert duration_in_tokens(f"{tokens}T", **here) == tokens  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(
    amount=st.integers(1, 10**12),
    unit=st.sampled_from(["", "ep", "T", "min"]),
    style=st.sampled_from(["{}", "{:_}", " {} ", "{}.0", "{}e0", "+{}"]),
    tokens_per_step=st.integers(1, 10**6),
    steps_per_epoch=st.integers(1, 10**6),
)
def test_a_length_means_the_same_in_every_spelling(
    amount: int, unit: str, style: str, tokens_per_step: int, steps_per_epoch: int
) -> None:
    sizes = {"tokens_per_step": tokens_per_step, "steps_per_epoch": steps_per_epoch, "key": "x"}
    written = style.format(amount) + unit
    found, plain = (save_interval(text, **sizes) for text in (written, f"{amount}{unit}"))  # type: ignore[arg-type]
    assert found == plain
    assert found is not None
    assert parse_duration(written, minutes_allowed=True).amount == amount
    assert (found.minutes is not None) == (unit == "min")


ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.text(alphabet="0123456789eE+-._ Tepmin", max_size=12)
    | st.lists(st.integers(), max_size=2)
)


@settings(max_examples=400, deadline=1000)  # `1e999999999T` must not be written out digit by digit
@example(value="1e999999999T")
@example(value="9" * 5_000)
@example(value=10**5_000)
@given(value=ANYTHING)
def test_any_value_is_a_length_or_refused_by_its_key(value: object) -> None:
    found, problems = None, []
    try:
        found = parse_duration(value, key="training.save_interval", minutes_allowed=True)
    except ConfigError as error:
        problems = error.problems
    if found is None:
        (sentence,) = problems
        assert sentence.startswith("training.save_interval is ")
        assert len(sentence) < 400
    else:
        assert found.amount >= 1
