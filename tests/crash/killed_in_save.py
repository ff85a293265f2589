"""`train_hf.py` that kills itself with SIGKILL inside a save: `STEP STAGE` in the environment say where."""

import os
import signal
import sys
from typing import Any

import train_hf
from olmo_hf.training import checkpoints

STEP, STAGE = int(os.environ["KILL_AT_STEP"]), os.environ["KILL_AT_STAGE"]
save = checkpoints.save_checkpoint


def save_and_die(run_dir: Any, snapshot: checkpoints.Snapshot, **kwargs: Any) -> Any:
    def on_stage(stage: str) -> None:
        if snapshot.run_state.step == STEP and stage == STAGE:
            os.kill(os.getpid(), signal.SIGKILL)

    return save(run_dir, snapshot, **{**kwargs, "on_stage": on_stage})


checkpoints.save_checkpoint = save_and_die

if __name__ == "__main__":
    sys.exit(train_hf.run_and_report(train_hf.main, sys.argv[1:]))
