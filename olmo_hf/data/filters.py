"""The repetition filter: instances with long periodic repetitions lose their labels.

Shapes: `S` tokens of an instance.
"""

from typing import NamedTuple

import numpy as np

from olmo_hf.data.args import InstanceFilterArgs

MIN_REPETITIONS = 3
"""Shorter runs are never reported, whatever the limit (as the original)."""


class PeriodicRun(NamedTuple):
    """`times` whole repetitions of `period` tokens in `[start, end)`."""

    start: int
    end: int
    period: int
    times: int


def _equal_runs(tokens: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray]:
    """First index and length of every maximal run of t with tokens[t] == tokens[t - period]."""
    equal = tokens[period:] == tokens[:-period]  # (S - period,)
    edges = np.diff(equal.astype(np.int8), prepend=0, append=0)
    starts = np.flatnonzero(edges == 1)
    return starts + period, np.flatnonzero(edges == -1) - starts


def periodic_runs(tokens: np.ndarray, *, min_period: int, max_period: int) -> list[PeriodicRun]:
    """Every maximal stretch in which a period repeats at least three times, by period and then by place.

    Args:
        tokens: Token ids, shape (S,).
        min_period: Shortest period, in tokens.
        max_period: Longest period, in tokens; never more than a third of S.
    """
    found = []
    for period in range(min_period, min(max_period, tokens.size // MIN_REPETITIONS) + 1):
        firsts, lengths = _equal_runs(tokens, period)
        for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
            times = (length + period) // period
            if times >= MIN_REPETITIONS:
                found.append(PeriodicRun(first - period, first + length, period, times))
    return found


def keep_instance(tokens: np.ndarray, args: InstanceFilterArgs) -> bool:
    """Whether an instance is trained on (spec: data.md section 7).

    False as soon as a period of `repetition_min_period` to `repetition_max_period` tokens repeats at least
    `repetition_max_count` times without a gap.

    Args:
        tokens: Token ids, shape (S,).
        args: Limits of the filter.
    """
    count = max(args.repetition_max_count, MIN_REPETITIONS)
    longest = min(args.repetition_max_period, tokens.size // MIN_REPETITIONS)
    for period in range(args.repetition_min_period, longest + 1):
        needed = (count - 1) * period
        # Counting is far cheaper than finding runs, and nearly every instance ends here.
        if np.count_nonzero(tokens[period:] == tokens[:-period]) < needed:
            continue
        if _equal_runs(tokens, period)[1].max() >= needed:
            return False
    return True
