"""Lengths of a run and of its intervals: steps (`300`), epochs (`"2ep"`) or tokens (`"5e12T"`), as numbers of steps.

The intervals between checkpoints may also be minutes (`"30min"`).

Nothing here needs torch, so that a configuration can be checked before anything heavy is loaded.
"""

from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Literal

from olmo_hf.errors import ConfigError

MOST_DIGITS = 24
"""A length with more decimal digits is a slip of the pen."""

_MOST_SHOWN_CHARACTERS = 60

_FORMS = 'steps (300), epochs ("2ep") or tokens ("5e12T")'
_FORMS_WITH_MINUTES = 'steps (300), epochs ("2ep"), tokens ("1e9T") or minutes ("30min")'


@dataclass(frozen=True)
class Duration:
    """A length with its unit, before it is known how many steps it takes."""

    amount: int
    """How many of `unit`; at least 1."""

    unit: Literal["steps", "epochs", "tokens", "minutes"]
    """What is counted; minutes only in intervals between checkpoints."""


@dataclass(frozen=True)
class Interval:
    """Time between two events, on one of two clocks."""

    steps: int | None = None
    """Optimizer steps; None: counted in minutes."""

    minutes: int | None = None
    """Minutes by the clock of rank 0; None: counted in steps."""


@dataclass(frozen=True, kw_only=True)
class SaveIntervals:
    """When checkpoints of each kind are due; None is never."""

    permanent: Interval | None = None
    """Checkpoints to go on from that are kept."""

    ephemeral: Interval | None = None
    """Checkpoints in between, of which one is kept."""

    unsharded: Interval | None = None
    """Directories that any Hugging Face tool loads."""


def parse_duration(value: object, *, key: str = "training.max_duration", minutes_allowed: bool = False) -> Duration:
    """Reads a length as it stands in the YAML.

    Fractions of an epoch are refused: the order of the data is redrawn at whole epochs only, so `"1.5ep"` has no exact
    meaning that is not better said in steps or tokens. A number such as `5e3` that is whole counts as an integer.

    Args:
        value: `300`, `"300"`, `"1_000"`, `5e3` (steps), `"2ep"` (epochs) or `"5e12T"` (tokens).
        key: name of the setting, for the message.
        minutes_allowed: whether `"30min"` is a length here.

    Raises:
        ConfigError: the value is none of these, or not positive.
    """
    forms, found = _FORMS_WITH_MINUTES if minutes_allowed else _FORMS, _shown(value)
    if isinstance(value, int) and abs(value) > 10**MOST_DIGITS:  # Python refuses to write some of these out
        raise ConfigError(f"{key} is {found}, which is longer than any run: write {forms}")
    text = str(value).strip() if isinstance(value, int | float | str) and not isinstance(value, bool) else ""
    unit: Literal["steps", "epochs", "tokens", "minutes"] = "steps"
    number = text
    if text.endswith("ep"):
        unit, number = "epochs", text.removesuffix("ep")
    elif text.endswith("T"):
        unit, number = "tokens", text.removesuffix("T")
    elif text.endswith("min") and minutes_allowed:
        unit, number = "minutes", text.removesuffix("min")
    try:
        amount = Decimal(number.strip())
    except InvalidOperation:
        raise ConfigError(f"{key} is {found}, which is not a length: write {forms}") from None
    if amount.is_finite() and amount.adjusted() > MOST_DIGITS:  # asked first: int() of such a number never ends
        raise ConfigError(f"{key} is {found}, which is longer than any run: write {forms}")
    if not amount.is_finite() or amount != int(amount):
        remedy = ": give the same length in steps or tokens" if unit == "epochs" else ""
        raise ConfigError(f"{key} is {found}, but the number of {unit} must be whole{remedy}")
    if amount < 1:
        raise ConfigError(f"{key} is {found}, but a length must be at least 1: write {forms}, or leave it out")
    return Duration(int(amount), unit)


def _shown(value: object) -> str:
    """A value as it was written, cut to what a message can hold."""
    if isinstance(value, int) and abs(value) > 10**MOST_DIGITS:
        return f"a number of more than {MOST_DIGITS} digits"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN_CHARACTERS else f"{text[:_MOST_SHOWN_CHARACTERS]}..."


def duration_in_steps(
    duration: object,
    *,
    tokens_per_step: int,
    steps_per_epoch: int,
    step: int = 0,
    tokens_seen: int = 0,
    key: str = "training.max_duration",
) -> int:
    """The number of the last optimizer step of a run of this length, counted from the very first step of the run.

    A length in tokens is met by what is still missing at the present batch size, so that a run that changed its batch
    size on the way still ends at the tokens asked for: `step + ceil((tokens - tokens_seen) / tokens_per_step)`
    (spec: trainer.md section 9).

    Args:
        duration: what `parse_duration` reads.
        tokens_per_step: tokens of one global batch.
        steps_per_epoch: whole global batches in the data.
        step: optimizer steps already taken.
        tokens_seen: tokens already trained on.
        key: name of the setting, for messages.

    Raises:
        ConfigError: the value is not a length.
    """
    parsed = parse_duration(duration, key=key)
    if parsed.unit == "steps":
        return parsed.amount
    if parsed.unit == "epochs":
        return parsed.amount * steps_per_epoch
    missing_tokens = max(parsed.amount - tokens_seen, 0)
    return step + -(-missing_tokens // tokens_per_step)


def duration_in_tokens(
    duration: object,
    *,
    tokens_per_step: int,
    steps_per_epoch: int,
    step: int = 0,
    tokens_seen: int = 0,
    key: str = "training.max_duration",
) -> int:
    """Tokens seen at the end of a run of this length; arguments as in `duration_in_steps`.

    A length in tokens is itself, also when the last step overshoots it: the schedule's floor is where the user put it.
    """
    parsed = parse_duration(duration, key=key)
    if parsed.unit == "tokens":
        return parsed.amount
    if parsed.unit == "epochs":
        return parsed.amount * steps_per_epoch * tokens_per_step
    return tokens_seen + max(parsed.amount - step, 0) * tokens_per_step


def interval_in_steps(interval: object, *, tokens_per_step: int, steps_per_epoch: int, key: str) -> int | None:
    """Steps between two events of an interval; None (never) stays None.

    An interval in tokens is rounded up to whole steps.

    Raises:
        ConfigError: the value is not a length.
    """
    if interval is None:
        return None
    return duration_in_steps(interval, tokens_per_step=tokens_per_step, steps_per_epoch=steps_per_epoch, key=key)


def save_interval(interval: object, *, tokens_per_step: int, steps_per_epoch: int, key: str) -> Interval | None:
    """As `interval_in_steps`, but minutes stay minutes.

    Raises:
        ConfigError: the value is not a length.
    """
    if interval is None:
        return None
    parsed = parse_duration(interval, key=key, minutes_allowed=True)
    if parsed.unit == "minutes":
        return Interval(minutes=parsed.amount)
    steps = duration_in_steps(interval, tokens_per_step=tokens_per_step, steps_per_epoch=steps_per_epoch, key=key)
    return Interval(steps=steps)
