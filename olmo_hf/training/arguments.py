"""`OlmoTrainingArguments`: Hugging Face's training arguments with the recipe's defaults and the fields it lacks."""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from accelerate.utils import DynamoBackend
from transformers import TrainingArguments

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs, TrainingArgs
from olmo_hf.training.batch_plan import BatchPlan
from olmo_hf.training.durations import SaveIntervals

_DDP_BACKENDS = {"nccl", "gloo", "mpi", "ccl", "hccl", "cncl", "mccl", "xccl"}
"""What Hugging Face's documentation of `ddp_backend` lists."""


@dataclass
class OlmoTrainingArguments(TrainingArguments):
    """Identical to `TrainingArguments` except for other defaults and the fields below.

    Defaults come from `TrainingArgs`, the `training` section of a YAML. Used by itself, without a YAML, it behaves as
    a Hugging Face user expects: `max_steps` or `num_train_epochs`, `gradient_accumulation_steps`, `save_steps` and
    `lr_scheduler_type` mean what they say as long as the fields below are left alone.
    """

    per_device_train_batch_size: int = TrainingArgs.per_device_train_batch_size
    per_device_eval_batch_size: int = TrainingArgs.per_device_eval_batch_size
    seed: int = TrainingArgs.seed
    learning_rate: float = TrainingArgs.learning_rate
    weight_decay: float = TrainingArgs.weight_decay
    adam_beta1: float = TrainingArgs.adam_beta1
    adam_beta2: float = TrainingArgs.adam_beta2
    adam_epsilon: float = TrainingArgs.adam_epsilon
    max_grad_norm: float = TrainingArgs.max_grad_norm
    logging_nan_inf_filter: bool = False
    # Hugging Face's default looks for parameters without a gradient in every backward pass, which makes the host wait
    # for the device once per tensor. In pretraining all of them have one.
    ddp_find_unused_parameters: bool | None = False

    learning_rate_factors: dict[str, float] = field(default_factory=dict)
    """Patterns of parameter names and their factors on `learning_rate`."""

    defer_gradient_reduction: bool = TrainingArgs.defer_gradient_reduction
    """FSDP with several micro-batches a step: gradients are reduced once a step instead of after each."""

    fsdp_layers_per_unit: int = TrainingArgs.fsdp_layers_per_unit
    """FSDP: consecutive layers that are gathered and reduced together."""

    fsdp_reduce_in_half: bool = TrainingArgs.fsdp_reduce_in_half
    """FSDP in half precision: gradients are summed over devices in it instead of in float32."""

    optimizer: Literal["adamw", "lion", "muon"] = TrainingArgs.optimizer
    """Update rule; another `optim` than Hugging Face's default replaces it."""

    decay_norm_and_bias: bool = TrainingArgs.decay_norm_and_bias
    """Whether norm weights and biases decay."""

    decay_embeddings: bool = TrainingArgs.decay_embeddings
    """Whether embedding matrices decay."""

    weight_decay_rule: Literal["by_role", "by_dimension"] = TrainingArgs.weight_decay_rule
    """Which parameters decay."""

    fused_adamw: bool = TrainingArgs.fused_adamw
    selective_updates: bool = TrainingArgs.selective_updates
    """Elements whose gradient is exactly 0 keep weight and moments."""

    record_update_metrics: bool = TrainingArgs.record_update_metrics
    """Report the size of the updates."""

    max_grad_norm_ratio: float = TrainingArgs.max_grad_norm_ratio
    """Adaptive clipping; 0.0 is off."""

    clip_groups: Literal["fused", "parameter"] = TrainingArgs.clip_groups
    """Tensors that adaptive clipping takes together."""

    nan_policy: Literal["stop", "skip"] = TrainingArgs.nan_policy
    """A gradient or loss that is no number: `stop` ends the run before the update, `skip` leaves the update out."""

    max_skipped_steps: int = TrainingArgs.max_skipped_steps
    """`nan_policy: skip` only: the run ends when more updates than this would be left out in a row."""

    optimizer_metrics_steps: int | None = TrainingArgs.optimizer_metrics_steps
    """Steps between detailed metrics: norm and extremes of every gradient, parameter and moment. None: never."""

    loss_denominator: Literal["label_tokens", "batch_tokens"] = TrainingArgs.loss_denominator
    """What token losses are divided by."""

    z_loss_weight: float = TrainingArgs.z_loss_weight
    """Weight of the squared log-partition term; 0.0 is off."""

    loss_implementation: Literal["auto", "plain", "chunked", "flash", "liger"] = TrainingArgs.loss_implementation
    """How the loss is computed; all agree."""

    loss_chunk_tokens: int = TrainingArgs.loss_chunk_tokens
    """`chunked` only: positions whose logits exist at the same time."""

    scheduler: SchedulerArgs | None = None
    """Learning-rate curve. None: Hugging Face's `lr_scheduler_type`."""

    max_tokens: int | None = None
    """Length of the run for a schedule in tokens. None: `max_steps` times the tokens of a step."""

    bolt_on_warmup: float = TrainingArgs.bolt_on_warmup
    """Second warm-up after a reset of the optimizer; 0.0 is off."""

    reset_optimizer: bool = TrainingArgs.reset_optimizer
    """When resuming: leave the optimizer's state behind."""

    reset_trainer_state: bool = TrainingArgs.reset_trainer_state
    """When resuming: start counting from zero."""

    restore_dataloader: bool = TrainingArgs.restore_dataloader
    """When resuming: False reads the data from their beginning."""

    fast_forward_batches: int = TrainingArgs.fast_forward_batches
    """When resuming: skip so many global batches, once."""

    start_epoch: int | None = TrainingArgs.start_epoch
    """When resuming: read this epoch of the data order from its beginning."""

    stop_step: int | None = None
    """Last step of this launch, where it is earlier than the end of the run."""

    save_intervals: SaveIntervals | None = None
    """When to save. None: Hugging Face's `save_strategy` and `save_steps`."""

    unsharded_optimizer: bool = TrainingArgs.unsharded_optimizer
    """Whether checkpoints of `save_intervals.unsharded` hold the optimizer."""

    keep_sharded: int = TrainingArgs.keep_sharded
    """Sharded permanent checkpoints kept; -1: as many as `save_total_limit` says, or all."""

    keep_unsharded: int = TrainingArgs.keep_unsharded
    """Unsharded permanent checkpoints kept; -1: as many as `save_total_limit` says, or all."""

    checkpoint_async: bool = TrainingArgs.checkpoint_async
    """Training goes on while a checkpoint is written."""

    upload_to: str | None = TrainingArgs.upload_to
    """Where checkpoints are copied to after they are on disk."""

    save_at_start: bool = False
    """Write a checkpoint before the first step and read it back."""

    def to_dict(self) -> dict[str, Any]:
        """Identical to `TrainingArguments` except that curves and intervals are plain too: trackers write them."""
        values = super().to_dict().items()
        return {name: asdict(value) if is_dataclass(value) else value for name, value in values}  # type: ignore[arg-type]


def build_training_arguments(
    training: TrainingArgs, plan: BatchPlan, *, run_dir: Path, data_loading: dict[str, Any]
) -> OlmoTrainingArguments:
    """The trainer's arguments from the YAML's section and the plan made from it.

    Args:
        training: the `training` section.
        plan: batch sizes and lengths (`plan_batches`).
        run_dir: the run directory.
        data_loading: the `dataloader_*` arguments, from the `data` section.

    Raises:
        ConfigError: what Hugging Face's arguments refuse.
    """
    known = {field.name for field in fields(OlmoTrainingArguments)}
    same_name = {f.name: getattr(training, f.name) for f in fields(TrainingArgs) if f.name in known}
    settings: dict[str, Any] = {
        **same_name,
        "output_dir": str(run_dir),
        "report_to": list(training.report_to) or "none",
        "max_steps": plan.max_steps,
        "max_tokens": plan.max_tokens,
        "stop_step": plan.stop_step,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "logging_strategy": "steps",
        "logging_steps": plan.logging_steps,
        "save_strategy": "no",  # `save_intervals` rules
        "save_intervals": plan.save_intervals,
        "eval_strategy": "no",  # evaluations are asked for by the callback, which knows the evaluators
        "disable_tqdm": True,  # the console callback draws the progress
        "ignore_data_skip": True,  # the order starts at the right instance by itself
        "use_cache": True,  # what a saved model should do in generation; training never uses the cache
        **data_loading,
        **training.transformers,
    }
    backends = {one.value.lower() for one in DynamoBackend}
    for name, known_values in (("torch_compile_backend", backends), ("ddp_backend", _DDP_BACKENDS)):
        value = settings.get(name)
        if value is not None and str(value).lower() not in known_values:
            listed = ", ".join(sorted(known_values))
            raise ConfigError(f"training.{name}: found {value!r}, expected one of {listed}; choose one")
    try:
        return OlmoTrainingArguments(**settings)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"training: {error}; mend or remove the setting that this is about") from error
