"""The repetition filter: instances with long periodic repetitions lose their labels.

Shapes: `S` tokens of an instance.
"""

import numpy as np

from olmo_hf.data.args import InstanceFilterArgs

MIN_REPETITIONS = 3
"""Fewer are no repetition, whatever the limit (as the original)."""


def _equal_runs(tokens: np.ndarray, period: int) -> tuple[np.ndarray, np.ndarray]:
    """First index and length of every maximal run of t with tokens[t] == tokens[t - period]."""
    equal = tokens[period:] == tokens[:-period]  # (S - period,)
    edges = np.diff(equal.astype(np.int8), prepend=0, append=0)
    starts = np.flatnonzero(edges == 1)
    return starts + period, np.flatnonzero(edges == -1) - starts


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
