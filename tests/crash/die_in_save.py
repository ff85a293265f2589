"""Importing this makes the process kill itself with SIGKILL inside a save: the environment says where."""

import os
import signal

from olmo_hf.training import checkpoints


def die(stage: str, step: int) -> None:
    """Instead of `checkpoints.reached`."""
    here = f"{step} {stage} {os.environ.get('RANK', '0')}"
    if here == os.environ["DIE_AT"]:
        os.kill(os.getpid(), signal.SIGKILL)


checkpoints.reached = die
