"""Importing this makes the save of step 6 meet a file where its directory was."""

import os
import shutil
from pathlib import Path

from olmo_hf.training import checkpoints


def obstruct(stage: str, step: int) -> None:
    """Instead of `checkpoints.reached`."""
    staging = Path(os.environ["RUN_DIR"]) / ".staging-checkpoint-6"
    if (stage, step) == ("open", 6):
        shutil.rmtree(staging)
        staging.write_text("in the way")


checkpoints.reached = obstruct
