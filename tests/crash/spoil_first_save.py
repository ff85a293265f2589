"""Importing this makes a disk that loses a bit of the checkpoint of step 0, before it is read back."""

import os
from pathlib import Path

from olmo_hf.training import checkpoints


def spoil(stage: str, step: int) -> None:
    """Instead of `checkpoints.reached`."""
    path = Path(os.environ["RUN_DIR"]) / "checkpoint-0" / "model.safetensors"
    if (stage, step) == ("done", 0):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


checkpoints.reached = spoil
