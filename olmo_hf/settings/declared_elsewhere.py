"""Fields that Hugging Face declares: `model.config` (our `OlmoHfConfig`) and, under `training`, `TrainingArguments`.

transformers is imported only when a configuration has such a key.
"""

import dataclasses
import functools
import typing
from typing import Any

from olmo_hf.settings.problems import Problems, shown
from olmo_hf.settings.values import read_value, unknown_key_sentence
from olmo_hf.training.args import TrainingArgs

_DURATION = "give the length in `training.max_duration` (300, '2ep' or '5e12T')"
_BATCH = "give `training.global_train_batch_size`; accumulation follows from it and the number of devices"
_SCHEDULER = "describe the curve in `training.scheduler`"
_SAVING = "use `training.save_interval`, `training.save_interval_ephemeral` and `training.keep_unsharded`"
_EVALUATION = "use the `evaluation` section"
_RESUME = "use `training.resume` (auto, never or a path)"
_MEMORY = "use `model.activation_checkpointing`"
_LAUNCH = "set it in the accelerate config that starts the run (accelerate_configs/)"
_DATA = "use the `data` section"
_LOADER = "use `data.num_workers`, `data.prefetch_factor` and `data.pin_memory`"
_FIXED = "leave it out"

REPLACED: dict[str, str] = {
    "transformers": "write the fields of TrainingArguments beside the others, directly under `training`",
    "max_steps": _DURATION,
    "num_train_epochs": _DURATION,
    "gradient_accumulation_steps": _BATCH,
    "auto_find_batch_size": "give `training.per_device_train_batch_size`; `--dry_run` prints the memory it needs",
    "average_tokens_across_devices": "it is always exact over all devices; see `training.loss_denominator`",
    "label_smoothing_factor": "the loss is plain cross-entropy; leave it out",
    "lr_scheduler_type": _SCHEDULER,
    "lr_scheduler_kwargs": _SCHEDULER,
    "warmup_steps": "use `training.scheduler.warmup`",
    "warmup_ratio": "use `training.scheduler.warmup`",
    "activation_checkpointing": _MEMORY,
    "activation_checkpointing_kwargs": _MEMORY,
    "gradient_checkpointing": _MEMORY,
    "gradient_checkpointing_kwargs": _MEMORY,
    "logging_strategy": "use `training.logging_steps`",
    "logging_dir": "`metrics.jsonl` lies in the run directory; trackers are named in `training.report_to`",
    "logging_nan_inf_filter": "a loss that is not a number is never hidden here; leave it out",
    "include_num_input_tokens_seen": "tokens are always counted, as `throughput/total_tokens`; leave it out",
    "disable_tqdm": "use `callbacks.console`",
    "run_name": "use `name`",
    "eval_strategy": "use `evaluation.interval`",
    "evaluation_strategy": "use `evaluation.interval`",
    "eval_steps": "use `evaluation.interval`",
    "eval_delay": "use `evaluation.interval`",
    "eval_on_start": "use `evaluation.on_load`",
    "eval_do_concat_batches": _EVALUATION,
    "eval_use_gather_object": _EVALUATION,
    "eval_accumulation_steps": _EVALUATION,
    "include_for_metrics": _EVALUATION,
    "batch_eval_metrics": _EVALUATION,
    "prediction_loss_only": _EVALUATION,
    "bf16_full_eval": "evaluation runs in the precision of training; leave it out",
    "fp16_full_eval": "evaluation runs in the precision of training; leave it out",
    "save_strategy": _SAVING,
    "save_steps": _SAVING,
    "save_total_limit": _SAVING,
    "save_only_model": "a checkpoint always holds what a restart needs; leave it out",
    "save_on_each_node": "a checkpoint is one directory for all nodes; leave it out",
    "save_safetensors": "checkpoints are always safetensors; leave it out",
    "overwrite_output_dir": "nothing is overwritten; give another `name`, or remove the directory yourself",
    "load_best_model_at_end": "the last checkpoint is the result; leave it out",
    "metric_for_best_model": "the last checkpoint is the result; leave it out",
    "greater_is_better": "the last checkpoint is the result; leave it out",
    "enable_jit_checkpoint": "it does not agree between ranks; leave it out",
    "resume_from_checkpoint": _RESUME,
    "ignore_data_skip": "the data goes on exactly where it stopped; see `training.resume`",
    "restore_callback_states_from_checkpoint": "callbacks always get their state back; leave it out",
    "data_seed": "use `data.seed`",
    "train_sampling_strategy": "use `data.shuffle`",
    "group_by_length": "every instance has `data.sequence_length` tokens; leave it out",
    "length_column_name": _DATA,
    "label_names": _DATA,
    "remove_unused_columns": _DATA,
    "dataloader_drop_last": "only whole global batches are trained on; leave it out",
    "dataloader_num_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": "the order is always kept; leave it out",
    "accelerator_config": _LAUNCH,
    "parallelism_config": _LAUNCH,
    "fsdp": _LAUNCH,
    "fsdp_config": _LAUNCH,
    "deepspeed": _LAUNCH,
    "local_rank": _LAUNCH,
    "no_cuda": _LAUNCH,
    "do_train": _FIXED,
    "do_eval": _FIXED,
    "do_predict": _FIXED,
}
"""Names that users of TrainingArguments look for, and what says the same here."""


@functools.cache
def training_argument_types() -> dict[str, Any]:
    """Fields of `transformers.TrainingArguments` that are passed through, with their types."""
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    own = {field.name for field in dataclasses.fields(TrainingArgs)}
    names = [field.name for field in dataclasses.fields(TrainingArguments) if field.init]
    return {name: hints[name] for name in names if name not in own and name not in REPLACED}


@functools.cache
def architecture_types() -> dict[str, Any]:
    """Fields of `OlmoHfConfig`, with their types."""
    from olmo_hf.model.configuration_olmo import OlmoHfConfig

    # Some inherited fields name their type in quotes, and mean modules that are not imported there.
    types = {f.name: Any if isinstance(f.type, str) else f.type for f in dataclasses.fields(OlmoHfConfig)}
    return types | {"rope_theta": float}  # Hugging Face's older spelling, which OlmoHfConfig takes as well


def field_types(block: str, name: str, known: typing.Container[str]) -> dict[str, Any]:
    """Types of further fields of a block, asked for only when `name` is not one of those already known."""
    if name in known:
        return {}
    if block == "training":
        return {name: Any} if name in REPLACED else training_argument_types()
    return architecture_types() if block == "model.config" else {}


def take_training_arguments(tree: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Removes the keys of `training` that `TrainingArgs` does not declare; the readable ones are returned."""
    section = tree.get("training")
    if not isinstance(section, dict):
        return {}
    own = [field.name for field in dataclasses.fields(TrainingArgs) if field.name != "transformers"]
    taken = {}
    for name in [name for name in section if name not in own]:
        value, key = section.pop(name), f"training.{name}"
        if name in REPLACED:
            problems.add(key, f"{key}: found {shown(value)}, but it is not used here; {REPLACED[name]}")
        elif name in training_argument_types():
            taken[name] = read_value(value, training_argument_types()[name], key, problems)
        else:
            names = [*own, *training_argument_types()]
            problems.add(key, unknown_key_sentence("training", str(name), names, list_known=False))
    return taken


def take_architecture(tree: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """Removes `model.config` and returns it, every field read as `OlmoHfConfig` declares it."""
    section = tree.get("model")
    config = section.pop("config", None) if isinstance(section, dict) else None
    if config is None:
        return {}
    if not isinstance(config, dict):
        problems.add("model.config", f"model.config: found {shown(config)}, expected fields of the architecture")
        return {}
    taken = {}
    for name, value in config.items():
        key = f"model.config.{name}"
        if name in architecture_types():
            taken[str(name)] = read_value(value, architecture_types()[name], key, problems)
        else:
            known = list(architecture_types())
            problems.add(key, unknown_key_sentence("model.config", str(name), known, list_known=False))
    return taken
