"""What may be asked of training: the `training` section of a run's YAML.

Fields that `transformers.TrainingArguments` also has carry its names; here they only get the recipe's defaults.
Every other field of `TrainingArguments` may be given in the YAML too and is kept in `transformers`.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

Duration = int | str
"""Steps (`300`), epochs (`"2ep"`) or tokens (`"5e12T"`); see `olmo_hf/training/durations.py`."""


@dataclass(frozen=True, kw_only=True)
class SchedulerArgs:
    """Learning rate over the run (spec: trainer.md section 8)."""

    name: Literal[
        "cosine_with_warmup",
        "linear_with_warmup",
        "inverse_sqrt_with_warmup",
        "max_scheduler",
        "constant",
        "constant_with_warmup",
        "cosine_linear_envelope",
        "warmup_stable_decay",
    ] = "cosine_with_warmup"
    """Shape of the curve."""

    units: Literal["steps", "tokens"] = "steps"
    """Unit of `warmup`, `t_max`, `decay` and `grad_clip_warmup`."""

    warmup: float = 100
    """Length of the linear warm-up, in `units`."""

    t_max: float | None = None
    """Where the curve reaches its floor, in `units`. None: the end of the run."""

    alpha_f: float = 0.1
    """Floor, as a fraction of the peak."""

    warmup_min_lr: float | None = None
    """Learning rate at the start of the warm-up. None: a tenth of the peak, as the original."""

    decay: float | None = None
    """`warmup_stable_decay` only: length of the final decay, in `units`."""

    decay_shape: Literal["linear", "cosine", "one_minus_sqrt"] = "linear"
    """`warmup_stable_decay` only: shape of the final decay."""

    grad_clip_warmup: float | None = None
    """Until here, in `units`, the clipping limits are multiplied by `grad_clip_warmup_factor`."""

    grad_clip_warmup_factor: float | None = None
    """Factor on the clipping limits during `grad_clip_warmup`."""

    grad_clip_warmup_lags: bool = True
    """As in the original, the limits of an update are those of the clock before it, and the first update has the plain
    ones. False: those of the clock after it, from the first update on."""


@dataclass(frozen=True, kw_only=True)
class TrainingArgs:
    """How it learns, for how long, and what is kept."""

    output_dir: str = ""
    """Run directory. Empty: `runs/NAME`."""

    max_duration: Duration | None = None
    """Length of the run: steps, epochs or tokens."""

    global_train_batch_size: int | None = None
    """Instances per optimizer step over all ranks; accumulation is derived from it."""

    per_device_train_batch_size: int = 8
    """Instances per forward pass and device (the micro-batch)."""

    defer_gradient_reduction: bool = False
    """FSDP with several micro-batches a step. False: gradients are reduced after each, as in the original; True: once
    a step, for up to 4 more bytes per parameter on every device. DDP, and HSDP between its replicas, always do it
    once."""

    fsdp_layers_per_unit: int = 1
    """FSDP: consecutive layers that are gathered and reduced together; more are fewer and larger messages, for more
    memory."""

    fsdp_reduce_in_half: bool = False
    """FSDP with `bf16` or `fp16`: gradients are summed over devices in that precision (`pure` of the original) instead
    of in float32 (`mixed`)."""

    per_device_eval_batch_size: int = 8
    """Instances per forward pass and device in evaluation."""

    seed: int = 6198
    """Seed of weights and dropout, and of the data order unless `data.seed` is set."""

    learning_rate: float = 4e-4
    """Peak learning rate."""

    learning_rate_factors: dict[str, float] = field(default_factory=dict)
    """Other peaks for some parameters: patterns of names (`"*embed_tokens*"`, with the `*` and `?` of a shell) and
    their factors on `learning_rate`. The first that fits decides; 0.0 holds a parameter still."""

    optimizer: Literal["adamw", "lion", "muon"] = "adamw"
    """Update rule (`muon`: for hidden matrices, AdamW for the rest). Any of Hugging Face's is reached by `optim`."""

    optim: str = "adamw_torch_fused"
    """Hugging Face's optimizer name (8-bit, Adafactor, schedule-free); any but the default replaces `optimizer`."""

    adam_beta1: float = 0.9
    """First decay rate of the moments (AdamW and Lion)."""

    adam_beta2: float = 0.95
    """Second decay rate of the moments (AdamW and Lion)."""

    adam_epsilon: float = 1e-8
    """Term added to the denominator of AdamW."""

    weight_decay: float = 0.1
    """Decoupled weight decay of the parameters that decay."""

    decay_norm_and_bias: bool = True
    """Whether norm weights and biases decay (OLMo-2: yes)."""

    decay_embeddings: bool = False
    """Whether embedding matrices decay (OLMo-2: no)."""

    weight_decay_rule: Literal["by_role", "by_dimension"] = "by_role"
    """Who decays. `by_role`: matrices do, norms, biases and embeddings by the two flags above; `by_dimension`: all
    with two or more dimensions, embeddings included, whatever the flags say."""

    fused_adamw: bool = True
    """AdamW in one pass over each tensor, instead of a dozen: 3 to 6 % of a step on a CPU. False adds in the order of
    the original trainer's, which differs in the last bits."""

    selective_updates: bool = False
    """Elements whose gradient is exactly 0 keep weight and moments (AdamW and Lion)."""

    record_update_metrics: bool = False
    """Report the size of the updates with the detailed metrics (AdamW), or their cosine to their sign (Lion). Refused,
    as `selective_updates` is, for any other optimizer."""

    max_grad_norm: float = 1.0
    """Largest global gradient norm; 0.0 is off."""

    max_grad_norm_ratio: float = 0.0
    """Adaptive clipping: largest gradient norm of a parameter as a multiple of its running average; 0.0 is off."""

    clip_groups: Literal["fused", "parameter"] = "fused"
    """Adaptive clipping: q, k, v share one limit and gate, up another, as in the original; or each tensor its own."""

    nan_policy: Literal["stop", "skip"] = "stop"
    """A gradient or loss that is no number: `stop` ends the run before the update, `skip` leaves the update out."""

    max_skipped_steps: int = 10
    """`nan_policy: skip` only: the run ends when more updates than this would be left out in a row."""

    optimizer_metrics_steps: int | None = None
    """Steps between detailed metrics: norm and extremes of every gradient, parameter and moment. None: never."""

    loss_denominator: Literal["label_tokens", "batch_tokens"] = "label_tokens"
    """What token losses are divided by: labelled targets of the global batch, or every token of it (the original)."""

    z_loss_weight: float = 0.0
    """Weight of the squared log-partition term; 0.0 is off."""

    scheduler: SchedulerArgs = field(default_factory=SchedulerArgs)
    """Learning-rate curve."""

    loss_implementation: Literal["auto", "plain", "chunked", "flash", "liger"] = "auto"
    """How the loss is computed; all agree. `plain`: from the model's logits; `chunked`: head and loss together, a few
    positions at a time; `flash`, `liger`: kernels of these packages (GPU). `auto`: `chunked` for our model, `plain`
    for any other. `liger` gives sums only: with it there is no loss by source."""

    loss_chunk_tokens: int = 1024
    """`chunked` only: positions whose logits exist at the same time."""

    bolt_on_warmup: float = 0.0
    """After a reset of the optimizer: warm the learning rate up again over this many `scheduler.units`; 0.0 is off."""

    resume: str = "auto"
    """`auto`: newest whole checkpoint of the run directory; `never`: refuse a directory that has one; or the path or
    address of a checkpoint."""

    reset_optimizer: bool = False
    """With a path in `resume`: start the optimizer afresh."""

    reset_trainer_state: bool = False
    """With a path in `resume`: start counting steps, tokens and data from zero."""

    restore_dataloader: bool = True
    """With a path in `resume`: False reads the data from their beginning, and they may be other data."""

    fast_forward_batches: int = 0
    """With a path in `resume`: skip this many global batches, once."""

    start_epoch: int | None = None
    """With a path in `resume`: read this epoch of the data order from its beginning. None: go on where it stood."""

    stop_at: int | None = None
    """Last step of this launch; the schedule is not changed by it."""

    stop_after: int | None = None
    """Number of steps of this launch; the schedule is not changed by it."""

    save_interval: Duration | None = 1000
    """Permanent checkpoints to go on from, every so many steps, tokens (`"1e9T"`) or minutes (`"30min"`): sharded
    under FSDP, otherwise unsharded. None: only the last one of a launch."""

    save_interval_ephemeral: Duration | None = None
    """The same, of which only the newest is kept, and none once a permanent one is newer."""

    save_interval_unsharded: Duration | None = None
    """Permanent checkpoints that any Hugging Face tool loads, whatever the model is spread over."""

    unsharded_optimizer: bool = True
    """Whether those of `save_interval_unsharded` hold the optimizer too; without it a run cannot go on from them."""

    keep_sharded: int = -1
    """Sharded permanent checkpoints kept; -1 keeps all."""

    keep_unsharded: int = -1
    """Unsharded permanent checkpoints kept; -1 keeps all."""

    checkpoint_async: bool = False
    """Training goes on while a checkpoint is written, from a copy in CPU memory; the last one is waited for."""

    upload_to: str | None = None
    """Where checkpoints are copied to after they are on disk (`s3://bucket/run`, `gs://`, `hf://`, `file://`). On a
    machine without them the run goes on from there."""

    save_at_start: bool = True
    """Write and read back a checkpoint before the first step: a full disk is found now, not at step 1000."""

    logging_steps: Duration = 1
    """Steps, or tokens (`"1e9T"`), between two lines of `metrics.jsonl` and of the trackers."""

    bf16: bool = False
    """Mixed precision in bfloat16."""

    fp16: bool = False
    """Mixed precision in float16 with dynamic loss scaling."""

    report_to: tuple[str, ...] = ()
    """Trackers by Hugging Face's names (`wandb`, `tensorboard`, `trackio`)."""

    transformers: dict[str, Any] = field(default_factory=dict)
    """Further fields of `transformers.TrainingArguments`; in the YAML they stand beside the others."""
