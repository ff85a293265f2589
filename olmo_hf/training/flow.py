"""When a run stops and saves: decided from the step alone, so that all ranks decide the same."""

from typing import Any

from transformers import TrainerControl, TrainerState

from olmo_hf.training.arguments import OlmoTrainingArguments
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.training.commit import Kind


def last_step(args: OlmoTrainingArguments, state: TrainerState) -> int:
    """The step after which this launch ends."""
    return state.max_steps if args.stop_step is None else min(args.stop_step, state.max_steps)


def kind_of_save(args: OlmoTrainingArguments, state: TrainerState, *, stopping: bool, sharded: bool) -> Kind:
    """What a checkpoint written at this step is.

    The last one of a launch is always a loadable model. A step that is due for both is permanent. The checkpoint
    before the first step gives way to the first real one.
    """
    if stopping or state.global_step >= last_step(args, state):
        return "unsharded"
    permanent = args.save_strategy == "steps" and state.global_step % int(args.save_steps) == 0
    every = args.ephemeral_save_steps
    ephemeral = state.global_step == 0 or (every is not None and state.global_step % every == 0)
    if ephemeral and (not permanent or state.global_step == 0):
        return "ephemeral"
    return "sharded" if sharded else "unsharded"


class StopAndSave(OlmoCallback):
    """Ends this launch at its last step, with a checkpoint; always present."""

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= last_step(args, state):
            control.should_training_stop = True
            control.should_save = True
            control.should_log = True
