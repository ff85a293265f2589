"""The repetition filter against the original's decisions."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_hf.data.args import InstanceFilterArgs
from olmo_hf.data.filters import keep_instance

FOLDER = Path(__file__).parents[1] / "golden" / "04_memmap"


def sequences() -> list[np.ndarray]:
    stored = np.load(FOLDER / "filter_sequences.npz")
    return np.split(stored["flat"], np.cumsum(stored["lengths"])[:-1])


def test_decisions_equal_the_originals() -> None:
    records = json.loads((FOLDER / "filter_decisions.json").read_text())
    decisions = 0
    for tokens, record in zip(sequences(), records, strict=True):
        assert tokens.size == record["length"]
        for decision in record["decisions"]:
            args = InstanceFilterArgs(**decision["config"])
            assert keep_instance(tokens, args) == decision["instance_mask_keep"], record["why"]
            decisions += 1
    assert decisions > len(records)


def repeats(tokens: list[int], period: int, count: int) -> bool:
    """Whether some stretch is a block of `period` tokens, `count` times: the definition, tried at every place."""
    block = count * period
    return any(
        tokens[first : first + block] == tokens[first : first + period] * count
        for first in range(len(tokens) - block + 1)
    )


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 2), max_size=40)
    | st.tuples(
        st.lists(st.integers(0, 3), max_size=8),
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
        st.integers(1, 6),
        st.lists(st.integers(0, 3), max_size=8),
    ).map(lambda parts: parts[0] + parts[1] * parts[2] + parts[3]),
    shortest=st.integers(1, 3),
    longest=st.integers(1, 6),
    count=st.integers(1, 6),
)
def test_decision_is_that_of_the_definition(tokens: list[int], shortest: int, longest: int, count: int) -> None:
    args = InstanceFilterArgs(
        repetition_min_period=shortest, repetition_max_period=longest, repetition_max_count=count
    )
    found = any(repeats(tokens, period, max(count, 3)) for period in range(shortest, longest + 1))
    assert keep_instance(np.array(tokens, dtype=np.uint16), args) == (not found)
