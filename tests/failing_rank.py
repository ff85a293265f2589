"""Importing this makes rank 1 fail in step 3 with what `FAULT` says; where `WAITS` is set, the other never goes on."""

import os
import time
from typing import Any

from olmo_hf.distributed import rank
from olmo_hf.errors import OlmoHfError
from olmo_hf.training.learning import LearningTrainer

training_step = LearningTrainer.training_step
kind, _, message = os.environ["FAULT"].partition(": ")


def fail(self: LearningTrainer, *args: Any, **kwargs: Any) -> Any:
    """Identical to that of `LearningTrainer` except for step 3."""
    if self.state.global_step == 2:
        if rank() == 1:
            raise {"RuntimeError": RuntimeError, "OlmoHfError": OlmoHfError}[kind](message)
        if "WAITS" in os.environ:
            time.sleep(100_000)  # as in a collective without the other one
    return training_step(self, *args, **kwargs)


LearningTrainer.training_step = fail  # type: ignore[method-assign]
