"""Importing this makes rank 1 stand still in the data of step 3 for `HANG_SECONDS`, or evaluations take so long."""

import os
import time
from typing import Any

from olmo_hf.evaluation import perplexity
from olmo_hf.training import checkpoints
from olmo_hf.training.trainer import OlmoTrainer

read_batches = OlmoTrainer.get_batch_samples
sums = perplexity.cross_entropy_sums
where, seconds = os.environ["HANG_WHERE"], float(os.environ["HANG_SECONDS"])


def get_batch_samples(self: OlmoTrainer, *args: Any) -> Any:
    """Identical to that of `OlmoTrainer` except for the standstill."""
    if where == "data" and self.state.global_step == 2 and os.environ.get("RANK") == "1":
        time.sleep(seconds)
    return read_batches(self, *args)


def slow_sums(*args: Any) -> Any:
    """Identical to `cross_entropy_sums` except for the time it takes."""
    time.sleep(seconds)
    return sums(*args)


def reached(stage: str, step: int) -> None:
    """Instead of `checkpoints.reached`."""
    if stage == "model" and step > 0:
        time.sleep(seconds)


OlmoTrainer.get_batch_samples = get_batch_samples  # type: ignore[method-assign]
if where == "evaluation":
    perplexity.cross_entropy_sums = slow_sums
    checkpoints.reached = reached
