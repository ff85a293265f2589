"""Python's garbage collector, at the same step on every rank."""

import gc
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import GarbageCollectorArgs
from olmo_hf.training.callback import OlmoCallback


class GarbageCollector(OlmoCallback):
    """Switches automatic collection off while training: ranks that collect at different times wait for each other.

    Young generations are collected every `interval_steps`, all of them after a checkpoint. What is there when training
    begins (modules, the model) is set aside, or every full collection would walk through it. When training ends
    everything is as before.
    """

    def __init__(self, args: GarbageCollectorArgs):
        self._interval_steps = args.interval_steps
        self._was_enabled = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self._interval_steps == 0:
            gc.collect(1)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        gc.collect()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
