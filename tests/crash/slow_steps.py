"""Importing this makes every step last `STEP_SECONDS` longer."""

import os
import time
from typing import Any

from olmo_hf.training.trainer import OlmoTrainer

read_batches = OlmoTrainer.get_batch_samples


def get_batch_samples(self: OlmoTrainer, *args: Any) -> Any:
    """Identical to that of `OlmoTrainer` except for the time it takes."""
    time.sleep(float(os.environ["STEP_SECONDS"]))
    return read_batches(self, *args)


OlmoTrainer.get_batch_samples = get_batch_samples  # type: ignore[method-assign]
