"""`OlmoTrainer`: Hugging Face's Trainer with exact token sums, one clock in tokens, and checkpoints that are whole.

The mathematics is elsewhere (`loss`, `clipping`, `schedulers`, `optimizers`); the trainer only calls it, at named
seams. Layers, each saying what it changes: `updating` and `learning` (optimizer, loss, metrics), `restarting` (data
order, checkpoints), `going_back` (to an earlier checkpoint in mid-launch) and this one (assembly and evaluation).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from transformers import PrinterCallback

from olmo_hf.data.collator import DataCollator
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.order import DataPosition, OrderedDataset
from olmo_hf.distributed import enable_fsdp_on_cpu, fsdp_requested, world_size
from olmo_hf.errors import ConfigError
from olmo_hf.training.evaluating import Evaluator, StopLooks, run_evaluators
from olmo_hf.training.flow import SaveSchedule
from olmo_hf.training.going_back import GoingBackTrainer
from olmo_hf.training.schedule_free import averaged_weights
from olmo_hf.training.sharding import Fill


class OlmoTrainer(GoingBackTrainer):
    """Identical to `transformers.Trainer` except where a method of these layers says so.

    Args:
        evaluators: run by `evaluate`; without any, `evaluate` is Hugging Face's.
        identity: what may not change unasked between launches (`RunState.identity`).
        flops_per_token: floating-point operations of one token, forward and backward; None leaves Hugging Face's
            estimate.
        fill_weights: for a model without memory (meta device) under FSDP: called once it is sharded, to give every
            parameter its first value.
        args: `OlmoTrainingArguments`, and like all that follows as for `Trainer`. A `MemMapDataset` is read in the
            run's order, an `OrderedDataset` in its own.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        evaluators: Sequence[Evaluator] = (),
        identity: dict[str, Any] | None = None,
        flops_per_token: int | None = None,
        fill_weights: Fill | None = None,
        **kwargs: Any,
    ):
        enable_fsdp_on_cpu()
        self.evaluators = list(evaluators)
        self.identity = identity if identity is not None else {}
        self.flops_per_token = flops_per_token
        self.fill_weights = fill_weights
        self.resumed_from = None
        self.step_ids = []
        self.save_schedule = SaveSchedule()
        callbacks = [self.save_schedule, *(kwargs.pop("callbacks", None) or [])]
        if isinstance(kwargs.get("train_dataset"), MemMapDataset | OrderedDataset):
            kwargs.setdefault("data_collator", DataCollator(pad_token_id=0))
        super().__init__(model, args, callbacks=callbacks, **kwargs)
        self.remove_callback(PrinterCallback)
        if self.args.world_size != world_size():
            raise ConfigError(
                f"{world_size()} processes take part, but the training arguments know of {self.args.world_size}: set "
                "use_cpu=True (or ACCELERATE_USE_CPU=true) before they are made, where there is no accelerator"
            )
        if fsdp_requested() and not self.is_fsdp_enabled:
            raise ConfigError(
                "the launcher asks for FSDP (ACCELERATE_USE_FSDP), but the model is not sharded; launch with a "
                "file of accelerate_configs/, which says all that FSDP needs"
            )
        if isinstance(self.train_dataset, MemMapDataset):
            self.train_dataset = OrderedDataset(
                self.train_dataset,
                seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
                shuffle=True,
                global_batch_size=self.global_batch_size,
                start=DataPosition(),
            )

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Identical to `Trainer` except that the run's evaluators answer, if there are any, until a stop is wanted."""
        if not self.evaluators:
            return super().evaluate(*args, **kwargs)
        self._tell_long_work("evaluation")
        looks = StopLooks(lambda: any(callback.wants_to_stop(self.state) for callback in self.olmo_callbacks))
        with averaged_weights(self.inner_optimizer, exactly=True):
            metrics = run_evaluators(
                self.evaluators,
                self.model_wrapped,
                device=self.args.device,
                autocast=lambda: self._forward_in_evaluation(looks),
            )
        if metrics:
            self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _forward_in_evaluation(self, looks: StopLooks) -> AbstractContextManager:
        """The context of a forward pass, as in training; the callbacks see that the evaluation gets on."""
        looks.before_pass()
        self._tell_long_work("evaluation")
        return self.compute_loss_context_manager()
