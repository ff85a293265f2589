"""`train_hf.py` that kills itself with SIGKILL inside a save: the environment says at which step and stage."""

import os
import signal
import sys

import train_hf
from olmo_hf.training import checkpoints

STEP, STAGE, RANK = int(os.environ["KILL_AT_STEP"]), os.environ["KILL_AT_STAGE"], os.environ.get("KILL_RANK", "0")


def die(stage: str, step: int) -> None:
    """Instead of `checkpoints.reached`."""
    if (step, stage, os.environ.get("RANK", "0")) == (STEP, STAGE, RANK):
        os.kill(os.getpid(), signal.SIGKILL)


checkpoints.reached = die

if __name__ == "__main__":
    sys.exit(train_hf.run_and_report(train_hf.main, sys.argv[1:]))
