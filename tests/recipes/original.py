"""A small configuration in the original's words, for tests to change."""

import copy
from pathlib import Path
from typing import Any

import yaml

BASE: dict[str, Any] = {
    "run_name": "small",
    "seed": 17,
    "model": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "mlp_hidden_size": 256,
        "rope": True,
        "rope_theta": 500000,
        "flash_attention": True,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "attention_layer_norm": True,
        "layer_norm_type": "rms",
        "layer_norm_eps": 1e-6,
        "norm_after": True,
        "include_bias": False,
        "bias_for_layer_norm": False,
        "weight_tying": False,
        "max_sequence_length": 32,
        "vocab_size": 500,
        "embedding_size": 512,
        "eos_token_id": 499,
        "pad_token_id": 498,
        "init_device": "meta",
        "init_cutoff_factor": 3,
    },
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "eps": 1e-8, "metrics_log_interval": 10},
    "scheduler": {"name": "cosine_with_warmup", "t_warmup": 8},
    "tokenizer": {"identifier": "tokens/mine.json"},
    "save_folder": "out/${run_name}",
    "max_duration": 60,
    "global_train_batch_size": 8,
    "device_train_microbatch_size": 2,
    "device_eval_batch_size": "${device_train_microbatch_size}",
    "precision": "amp_bf16",
    "fsdp": {"wrapping_strategy": "by_block", "precision": "mixed"},
    "max_grad_norm": 1.0,
    "data": {"paths": ["a.npy", "b.npy"], "memmap_dtype": "uint16", "num_workers": 2, "drop_last": True},
}


def write(directory: Path, changes: dict[str, Any] | None = None) -> Path:
    """`BASE` as a file, with dotted changes."""
    tree = copy.deepcopy(BASE)
    for key, value in (changes or {}).items():
        *blocks, last = key.split(".")
        node = tree
        for block in blocks:
            node = node.setdefault(block, {})
        node[last] = value
    path = directory / "original.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return path
