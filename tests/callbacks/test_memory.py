import numpy as np
import pytest
import torch

from olmo_hf.callbacks.args import MemoryArgs
from olmo_hf.callbacks.memory import Memory, process_peak_bytes


def test_peak_of_the_process_counts_what_was_held(state) -> None:
    block = np.ones(40_000_000, dtype=np.uint8)
    before = process_peak_bytes()
    larger = np.ones(300_000_000, dtype=np.uint8)
    assert process_peak_bytes() > 300_000_000
    assert process_peak_bytes() >= before
    del block, larger
    assert Memory(MemoryArgs()).collect_metrics(state)["System/Peak Memory (MB)"] > 300


def test_reported_at_the_first_steps_and_then_now_and_then(state) -> None:
    callback = Memory(MemoryArgs(interval_steps=4))
    reported = []
    for step in range(1, 13):
        state.global_step = step
        if callback.collect_metrics(state):
            reported.append(step)
    assert reported == [1, 2, 4, 8, 12]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_of_the_device(state) -> None:
    state.global_step = 1
    Memory(MemoryArgs()).collect_metrics(state)
    held = torch.zeros(50_000_000, dtype=torch.uint8, device="cuda")
    assert Memory(MemoryArgs()).collect_metrics(state)["System/Peak GPU Memory (MB)"] >= 50
    del held
