"""Importing this makes the file CANCEL appear just before a step: the environment says which."""

import os
from typing import Any

from olmo_hf.training.trainer import OlmoTrainer

read_batches = OlmoTrainer.get_batch_samples


def get_batch_samples(self: OlmoTrainer, *args: Any) -> Any:
    """Identical to that of `OlmoTrainer` except for the file."""
    if self.state.global_step + 1 == int(os.environ["CANCEL_AT"]):
        (self.run_dir / "CANCEL").touch()
    return read_batches(self, *args)


OlmoTrainer.get_batch_samples = get_batch_samples  # type: ignore[method-assign]
