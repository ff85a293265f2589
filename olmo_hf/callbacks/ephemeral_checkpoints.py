"""Checkpoints in between, of which one is kept: little is lost in a crash, and little disk is used."""

from typing import Any

from transformers import TrainerControl, TrainerState

from olmo_hf.training.callback import OlmoCallback


class EphemeralCheckpoints(OlmoCallback):
    """Asks for a checkpoint every `interval_steps`; the trainer keeps the newest and drops it for a permanent one."""

    def __init__(self, interval_steps: int):
        self.interval_steps = interval_steps

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.interval_steps == 0:
            control.should_save = True
