"""How much memory was needed at most, on the device and in the process, over all ranks."""

import resource
import sys
from typing import Any

import torch
from transformers import TrainerState

from olmo_hf import distributed
from olmo_hf.callbacks.args import MemoryArgs
from olmo_hf.training.callback import OlmoCallback

_ALWAYS_BEFORE_STEP = 3


class Memory(OlmoCallback):
    """`System/Peak GPU Memory (MB)` since the last report and `System/Peak Memory (MB)` of the process so far.

    Both are the largest over all ranks, in 10^6 bytes; reported for the first steps and then every `interval_steps`,
    since it takes one small collective.
    """

    def __init__(self, args: MemoryArgs):
        self._interval_steps = args.interval_steps

    def collect_metrics(self, state: TrainerState) -> dict[str, float]:
        step = state.global_step
        if step >= _ALWAYS_BEFORE_STEP and step % self._interval_steps != 0:
            return {}
        own: dict[str, float] = {"System/Peak Memory (MB)": process_peak_bytes() / 1e6}
        if torch.cuda.is_available():
            own["System/Peak GPU Memory (MB)"] = torch.cuda.max_memory_allocated() / 1e6
            torch.cuda.reset_peak_memory_stats()
        return dict(zip(own, _largest(list(own.values())), strict=True))


def process_peak_bytes() -> int:
    """Largest resident size of this process since it began."""
    peak: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _largest(values: list[float]) -> list[float]:
    """Element by element over all ranks: each rank fills its own row of a table that is then summed."""
    table = torch.zeros(distributed.world_size(), len(values), dtype=torch.float64)
    table[distributed.rank()] = torch.tensor(values, dtype=torch.float64)
    return distributed.all_reduce_sum(table).amax(dim=0).tolist()
