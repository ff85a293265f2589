"""When evaluators run: every so many steps, at the end, and before the first step when asked."""

from typing import Any

from transformers import TrainerControl, TrainerState

from olmo_hf.training.callback import OlmoCallback


class EvaluationSchedule(OlmoCallback):
    """Asks the trainer to evaluate.

    Args:
        interval_steps: steps between evaluations; None: only at the end.
        last_step: the step after which this launch ends.
        on_load: also before the first step of this launch.
    """

    def __init__(self, interval_steps: int | None, last_step: int, *, on_load: bool = False):
        self.interval_steps = interval_steps
        self.last_step = last_step
        self.on_load = on_load

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # `Trainer` looks at this right after the hook: the model is loaded, no step is taken.
        args.eval_on_start = self.on_load

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        due = self.interval_steps is not None and state.global_step % self.interval_steps == 0
        if due or state.global_step >= self.last_step:
            control.should_evaluate = True
