"""A training step asks for no more than it did: operators, bytes, waits for the device and Python calls are counted.

Counts are the same on a busy machine, so the limits are what was counted when they were written, with a little room
where a clock or a version of Python has a say. Lower one after making the step cheaper; raise one only with a reason.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import growth
from benchmarks.measuring.counting import (
    CALL_STEPS,
    SIZES,
    STEPS,
    WARM_STEPS,
    OperationCounter,
    StepCounts,
    count_steps,
    take_apart,
)
from benchmarks.rivals.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]

Counts = dict[str, dict[str, dict[str, int]]]
"""By loop, part of a step and kind of count."""

LIMITS: dict[str, dict[str, int]] = {
    # Matrix products, norms, rotation, attention, MLP; forward and backward. Backward passes in Python are paid
    # for in calls, some 30 microseconds, and save operators and bytes.
    "layer and micro-batch": {"operations": 142, "bytes_touched": 791_000, "synchronisations": 0, "python_calls": 800},
    # Clipping and update of 11 tensors. Less than nothing is possible: from the second micro-batch on gradients are
    # added, which makes the first one cheaper than it is taken for here.
    "layer": {"operations": 99, "bytes_touched": 831_000, "synchronisations": 11, "python_calls": 900},
    # Loading, embedding, rotary tables, head and loss.
    "micro-batch": {"operations": 100, "bytes_touched": 478_000, "synchronisations": 0, "python_calls": 1_150},
    # Sums over the step, the verdict on it, learning rate, metrics, callbacks and one line of the log.
    "step": {"operations": 80, "bytes_touched": 630_000, "synchronisations": 7, "python_calls": 2_050},
}


@pytest.fixture(scope="module")
def counts() -> Counts:
    """Of `train_hf.py` and of a bare loop, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "step_counts.py"), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines, done.stdout[-2000:]
    found: Any = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("part", LIMITS)
def test_no_part_of_a_step_costs_more_than_it_did(counts, part):
    found = counts["ours"][part]
    above = {kind: (found[kind], limit) for kind, limit in LIMITS[part].items() if found[kind] > limit}
    assert not above, (
        f"once per {part}, found and limit: {above}; `python benchmarks/step_counts.py --names` says more"
    )


def test_a_layer_asks_for_no_more_than_that_of_transformers(counts):
    part = "layer and micro-batch"
    for kind in ("operations", "bytes_touched"):
        assert counts["ours"][part][kind] <= counts["bare"][part][kind]


def test_with_a_second_rank_the_host_waits_for_the_device_no_more_often(counts):
    """DDP that looks for parameters without a gradient asks each of the 25 whether it has one."""
    of_rank = replace(WORKLOADS["none"], num_layers=2, global_batch=2 * 2)
    for found in growth.measure(of_rank, None, ranks=2):
        assert found["synchronisations"] <= counts["ours"]["whole"]["synchronisations"] + 2


def test_operators_are_counted_with_what_they_touch_and_views_are_not():
    x, weight = torch.ones(2, 3), torch.ones(3, 5, requires_grad=True)
    with OperationCounter() as counter:
        loss = (x @ weight).view(10).sum()
        loss.backward()
        loss.item()
    assert counter.by_name == {
        "aten::mm": 2,  # forward, and backward by the weight alone
        "aten::sum": 1,
        "aten::ones_like": 1,
        "aten::_local_scalar_dense": 1,
    }
    products, rest = (6 + 15 + 10) + (6 + 10 + 15), (10 + 1) + (1 + 1) + 1
    assert counter.bytes_touched == 4 * (products + rest)
    assert (counter.operations, counter.synchronisations) == (5, 1)


def test_steps_are_counted_from_end_to_end():
    def step(number: int) -> None:
        for _ in range(number):
            torch.zeros(1).add_(1)

    counts = count_steps(step).counts()
    assert counts.operations == 2 * WARM_STEPS  # step number 3, of zeros and add_
    rise = 2 * (STEPS - CALL_STEPS // 2 - 1)  # of the middle one of those whose calls are counted
    assert rise <= counts.python_calls <= rise + 6


def test_parts_add_up_to_the_whole():
    def of(layers: int, parts: int) -> StepCounts:
        return StepCounts(*(a + layers * b + parts * c + layers * parts * d for a, b, c, d in COSTS))

    found = take_apart({size: of(*size) for size in SIZES})
    by_part = {"step": 0, "layer": 1, "micro-batch": 2, "layer and micro-batch": 3}
    assert found == {part: StepCounts(*(cost[i] for cost in COSTS)) for part, i in by_part.items()}


COSTS = [(7, 5, 3, 2), (70, 50, 30, 20), (1, 0, 0, 0), (11, 13, 17, 19)]
