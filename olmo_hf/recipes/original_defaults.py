"""Every key of the original trainer's configuration with its default (spec: trainer.md section 1, data.md section 1).

Model keys are in `olmo_hf/model/conversion/architecture.py`.
"""

from typing import Any

from olmo_hf.model.conversion.architecture import ORIGINAL_DEFAULTS

TOP: dict[str, Any] = {
    "run_name": None,
    "seed": 6198,
    "epoch": None,
    "dry_run": False,
    "restore_dataloader": True,
    "fast_forward_batches": None,
    "eval_interval": 1000,
    "save_folder": "./",
    "remote_save_folder": None,
    "canceled_check_interval": 50,
    "save_interval": 1000,
    "save_interval_unsharded": None,
    "save_interval_ephemeral": None,
    "save_num_checkpoints_to_keep": -1,
    "save_num_unsharded_checkpoints_to_keep": -1,
    "save_overwrite": False,
    "force_save_unsharded": False,
    "no_pre_train_checkpoint": False,
    "load_path": None,
    "load_path_sharded_checkpointer": None,
    "try_load_latest_save": False,
    "reset_optimizer_state": False,
    "reset_trainer_state": False,
    "sharded_checkpointer": "torch_legacy",
    "new_style_checkpoints": None,
    "max_duration": 10_000,
    "global_train_batch_size": 512,
    "device_train_batch_size": None,
    "device_train_microbatch_size": 16,
    "device_eval_batch_size": 16,
    "eval_subset_num_batches": -1,
    "eval_on_load": False,
    "device_train_grad_accum": None,
    "max_grad_norm": None,
    "max_grad_norm_ratio": None,
    "precision": None,
    "console_log_interval": 1,
    "gen1_gc_interval": 1,
    "distributed_strategy": "fsdp",
    "softmax_auxiliary_loss": False,
    "auxiliary_loss_multiplier": 1e-4,
    "time_limit": None,
    "extra_steps_after_cancel": 10,
    "early_stopping_factor": None,
    "save_data_indices": True,
    "python_profiling": False,
    "torch_profiling": False,
    "stop_at": None,
    "stop_after": None,
    "activation_checkpointing": None,
    "fused_loss": None,
    "hf_datasets_cache_dir": None,
    "module_outputs_save_steps": None,
}

OPTIMIZER: dict[str, Any] = {
    "name": "lionw",
    "learning_rate": 1e-4,
    "weight_decay": 0.01,
    "betas": [0.9, 0.95],
    "eps": 1e-5,
    "no_decay_norm_and_bias": None,
    "selective_updates": False,
    "decay_norm_and_bias": False,
    "decay_embeddings": False,
    "metrics_log_interval": None,
    "record_update_metrics": False,
}

SCHEDULER: dict[str, Any] = {
    "name": "cosine_with_warmup",
    "units": "steps",
    "t_warmup": 100,
    "t_max": None,
    "alpha_f": 0.1,
    "grad_clip_warmup_steps": None,
    "grad_clip_warmup_factor": None,
    "warmup_min_lr": None,
}

DATA: dict[str, Any] = {
    "paths": None,
    "memmap_dtype": "uint16",
    "datasets": None,
    "label_mask_paths": None,
    "pad_direction": "right",
    "generate_attention_mask": False,
    "generate_doc_lengths": False,
    "num_workers": 0,
    "drop_last": False,
    "pin_memory": False,
    "prefetch_factor": None,
    "persistent_workers": False,
    "timeout": 0,
    "seed": None,
    "instance_filter": None,
    "custom_dataset": None,
    "token_field": None,
}

INSTANCE_FILTER: dict[str, Any] = {"repetition_max_period": 13, "repetition_min_period": 1, "repetition_max_count": 32}

EVALUATOR: dict[str, Any] = {"label": None, "type": "lm", "device_eval_batch_size": None, "subset_num_batches": None}

BLOCKS: dict[str, dict[str, Any]] = {
    "optimizer": OPTIMIZER,
    "scheduler": SCHEDULER,
    "data": DATA,
    "tokenizer": {"identifier": "gpt2", "truncate_direction": "right"},
    "wandb": {
        "project": None,
        "entity": "ai2-llm",
        "group": None,
        "name": None,
        "tags": ["watching"],
        "log_artifacts": False,
        "rank_zero_only": True,
        "log_interval": 1,
    },
    "speed_monitor": {"window_size": 100, "gpu_flops_available": None},
    "compile": {"mode": None, "fullgraph": False, "backend": "inductor", "dynamic": None},
    "fsdp": {
        "use_orig_params": True,
        "sharding_strategy": "FULL_SHARD",
        "wrapping_strategy": None,
        "precision": "pure",
        "hybrid_sharding_num_model_replicas": None,
    },
    "ddp": {"grad_sync_mode": "batch", "find_unused_params": False},
    "single": {"device": "auto"},
}


EMPTY_IS_ON = {
    "wandb": "log_interval",
    "speed_monitor": "window_size",
    "compile": "fullgraph",
    "fsdp": "sharding_strategy",
    "ddp": "grad_sync_mode",
    "single": "device",
    "data.instance_filter": "repetition_max_period",
}
"""Blocks that are off when they are left out or null, and on with their defaults when they are empty; and one key."""

EMPTY_SECTIONS = ("model", "optimizer", "scheduler", "data", "tokenizer")
"""Sections that are always there; empty is the same as left out."""

# What a key holds whose default is null, or whose default is a whole number though fractions are allowed.
TYPES: dict[str, tuple[type, ...]] = {
    "run_name": (str,),
    "epoch": (int,),
    "fast_forward_batches": (int,),
    "remote_save_folder": (str,),
    "save_interval_unsharded": (int,),
    "save_interval_ephemeral": (int,),
    "load_path": (str,),
    "max_duration": (int, str),
    "max_grad_norm": (float,),
    "max_grad_norm_ratio": (float,),
    "precision": (str,),
    "time_limit": (float,),
    "early_stopping_factor": (float,),
    "stop_at": (int,),
    "stop_after": (int,),
    "activation_checkpointing": (str, bool),
    "fused_loss": (bool,),
    "module_outputs_save_steps": (list,),
    "optimizer.no_decay_norm_and_bias": (bool,),
    "optimizer.metrics_log_interval": (int,),
    "scheduler.t_warmup": (float,),
    "scheduler.t_max": (float,),
    "scheduler.grad_clip_warmup_steps": (float,),
    "scheduler.grad_clip_warmup_factor": (float,),
    "scheduler.warmup_min_lr": (float,),
    "data.paths": (list, str),
    "data.label_mask_paths": (list,),
    "data.prefetch_factor": (int,),
    "data.seed": (int,),
    "compile.mode": (str,),
    "model.n_kv_heads": (int,),
    "model.multi_query_attention": (bool,),
    "model.clip_qkv": (float,),
    "model.mlp_hidden_size": (int,),
    "model.rope_theta": (int, float),
    "model.bias_for_layer_norm": (bool,),
    "model.init_device": (str,),
    "model.init_cutoff_factor": (float,),
    "model.emb_init_std": (float,),
    "model.precision": (str,),
}

NULL_MEANS_SOMETHING = (
    "gen1_gc_interval",
    "save_interval",
    "tokenizer.identifier",
    "eval_interval",
    "wandb.entity",
    "wandb.tags",
    "fsdp.precision",
    "model.embedding_size",
)
"""Keys with a default that may be null all the same."""


TAKES_WHOLE_NUMBERS_AND_FRACTIONS = ("scheduler.t_warmup", "scheduler.t_max", "scheduler.grad_clip_warmup_steps")
"""Keys of two types, for which the original does not read numbers out of texts."""


_SWITCHES = {"yes": True, "y": True, "on": True, "true": True, "1": True}
_SWITCHES |= {"no": False, "n": False, "off": False, "false": False, "0": False}


def kinds_of(key: str) -> tuple[type, ...]:
    """Types of a key's values, null aside; empty for a key that the original does not know, or where any will do."""
    defaults = flat_defaults() | {f"model.{name}": value for name, value in ORIGINAL_DEFAULTS.items()}
    if key in TYPES:
        return TYPES[key]
    return () if defaults.get(key) is None else (type(defaults[key]),)


def is_of_its_type(key: str, value: Any) -> bool:
    """Whether the original would take the value; keys that it does not know are judged elsewhere."""
    defaults = flat_defaults() | {f"model.{name}": value for name, value in ORIGINAL_DEFAULTS.items()}
    if key not in defaults:
        return True
    if value is None:
        return defaults[key] is None or key in NULL_MEANS_SOMETHING
    kinds = kinds_of(key)
    if not kinds:
        return True
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (isinstance(value, int) and float in kinds)


def as_the_original_reads_it(tree: Any, prefix: str = "") -> Any:
    """The settings with numbers and switches in quotes read as such, where a key has a type that asks for it."""
    if isinstance(tree, dict):
        return {
            name: as_the_original_reads_it(item, f"{prefix}.{name}" if prefix else str(name))
            for name, item in tree.items()
        }
    kinds = kinds_of(prefix)
    if kinds == (bool,) and isinstance(tree, str | int):
        return _SWITCHES.get(str(tree).lower(), tree)
    if not isinstance(tree, str) or prefix in TAKES_WHOLE_NUMBERS_AND_FRACTIONS or kinds not in ((int,), (float,)):
        return tree
    try:
        return kinds[0](tree)
    except ValueError:
        return tree


def flat_defaults() -> dict[str, Any]:
    """All of them by dotted key, blocks included."""
    return TOP | {f"{block}.{name}": value for block, keys in BLOCKS.items() for name, value in keys.items()}


def write_out_empty_blocks(tree: dict[str, Any]) -> list[str]:
    """Gives empty blocks that are on one of their defaults to show it; returns their keys."""
    found = []
    for block, name in EMPTY_IS_ON.items():
        *sections, last = block.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get(last) == {}:
            default = INSTANCE_FILTER[name] if block == "data.instance_filter" else BLOCKS[block][name]
            node[last] = {name: default}
            found.append(block)
    return found
