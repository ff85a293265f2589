"""Every feature of a run that a setting turns on, and how to turn on several of them in a small run.

A feature is a set of settings by their dotted keys. Two features that set the same key are two choices for it and
never come together; all others may, and where the product refuses a pair, `REFUSED` says so.
"""

import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

from tests import runs

Settings = dict[str, Any]
EPHEMERAL = "training.save_interval_ephemeral"

MODEL: dict[str, Settings] = {
    "eager attention": {"model.attn_implementation": "eager"},
    "layers recomputed": {"model.activation_checkpointing": "whole_layer"},
    "parts recomputed": {"model.activation_checkpointing": "fine_grained"},
    "tied head": {"model.config.tie_word_embeddings": True},
    "grouped queries": {"model.config.num_key_value_heads": 2},
    "alibi": {"model.config.position_embedding": "alibi"},
    "tokenizer": {"model.tokenizer": "{here}/tokenizer"},
    "published model": {"model": {"init_from": "{here}/published"}},
}
DATA: dict[str, Settings] = {
    "mix": {
        "data.paths": [],
        "data.sources": {
            "a": {"paths": ["{here}/tokens.npy"], "weight": 0.7},
            "b": {"paths": ["{here}/more.npy"], "weight": 0.3},
        },
    },
    "permutation": {"data.order": "permutation"},
    "random offsets": {"data.order": "random_offsets"},
    "file order": {"data.shuffle": False},
    "order on disk": {"data.index_dir": "{here}/orders"},
    "label masks": {"data.label_mask_paths": ["{here}/mask.npy"]},
    "filter": {"data.instance_filter": {"repetition_max_count": 3}},
    "documents apart": {"data.document_masking": True},
    "positions anew": {"data.document_masking": True, "data.document_positions": "reset"},
    "worker": {"data.num_workers": 1, "data.prefetch_factor": 3},
    "every token checked": {"data.check": "full"},
    "nothing checked": {"data.check": "none"},
    "own seed of data": {"data.seed": 7},
}
OPTIMIZER: dict[str, Settings] = {
    "lion": {"training.optimizer": "lion"},
    "muon": {"training.optimizer": "muon"},
    "adafactor": {"training.optim": "adafactor"},
    "sgd": {"training.optim": "sgd"},
    "schedule free": {"training.optim": "schedule_free_adamw", "training.scheduler": {"name": "constant"}},
    "factors": {"training.learning_rate_factors": {"*embed_tokens*": 0.5}},
    "decay by dimension": {"training.weight_decay_rule": "by_dimension"},
    "embeddings decay": {"training.decay_embeddings": True, "training.decay_norm_and_bias": False},
    "selective updates": {"training.selective_updates": True},
    "updates on record": {"training.record_update_metrics": True, "training.optimizer_metrics_steps": 2},
    "details": {"training.optimizer_metrics_steps": 3},
    "adaptive clipping": {"training.max_grad_norm_ratio": 1.5},
    "clipping by tensor": {"training.max_grad_norm_ratio": 1.2, "training.clip_groups": "parameter"},
    "no clipping": {"training.max_grad_norm": 0.0},
    "bad steps left out": {"training.nan_policy": "skip"},
}
SCHEDULE: dict[str, Settings] = {
    name: {"training.scheduler": {"name": name, "units": units, "warmup": warmup, **further}}
    for name, units, warmup, further in (
        ("linear_with_warmup", "steps", 2, {}),
        ("inverse_sqrt_with_warmup", "tokens", 256, {}),
        ("max_scheduler", "steps", 2, {"t_max": 4}),
        ("constant_with_warmup", "steps", 3, {}),
        ("cosine_linear_envelope", "tokens", 128, {"grad_clip_warmup": 256, "grad_clip_warmup_factor": 2.0}),
        ("warmup_stable_decay", "steps", 1, {"decay": 2, "decay_shape": "cosine"}),
    )
}
LOSS: dict[str, Settings] = {
    "plain loss": {"training.loss_implementation": "plain"},
    "chunked loss": {"training.loss_implementation": "chunked", "training.loss_chunk_tokens": 7},
    "no z": {"training.z_loss_weight": 0.0},
    "all tokens count": {"training.loss_denominator": "batch_tokens"},
    "bf16": {"training.bf16": True, "training.use_cpu": True},
    "one pass": {"training.per_device_train_batch_size": 8},
    "reduced at the end": {"training.defer_gradient_reduction": True},
    "two layers a unit": {"training.fsdp_layers_per_unit": 2},
}
SAVING: dict[str, Settings] = {
    "saved by tokens": {"training.save_interval": "384T"},
    "saved by minutes": {"training.save_interval": "1min"},
    "models in between": {"training.save_interval_unsharded": 3, "training.unsharded_optimizer": False},
    "few kept": {"training.keep_unsharded": 1, "training.keep_sharded": 1},
    "in the background": {"training.checkpoint_async": True},
    "copies": {"training.upload_to": "file://{here}/store"},
    "no first checkpoint": {"training.save_at_start": False},
    "no ephemeral ones": {EPHEMERAL: None},
    "ephemeral by minutes": {EPHEMERAL: "1min"},
    "tensorboard": {"training.report_to": ["tensorboard"]},
}
LENGTH: dict[str, Settings] = {
    "an epoch": {"training.max_duration": "1ep"},
    "length in tokens": {"training.max_duration": "640T"},
    "stops early": {"training.stop_at": 4},
    "so many steps": {"training.stop_after": 4},
    "logged by tokens": {"training.logging_steps": "256T"},
}
BESIDE: dict[str, Settings] = {
    "no speed": {"callbacks.speed_monitor": None},
    "no indices": {"callbacks.data_indices": None},
    "no collector": {"callbacks.garbage_collector": None},
    "no cancellation": {"callbacks.cancellation": None},
    "no spikes": {"callbacks.loss_spike": None},
    "no memory": {"callbacks.memory": None},
    "no heartbeat": {"callbacks.heartbeat": None},
    "time limit": {"callbacks.cancellation": {"time_limit_seconds": 3600, "extra_steps": 1}},
    "early stopping": {"callbacks.cancellation": {"early_stopping_factor": 4.0}},
    "going back": {"callbacks.loss_spike": {"max_rollbacks": 2}},
    "profiler": {"callbacks.profiler": {"skip_steps": 1, "num_steps": 1}},
    "outputs": {"callbacks.model_outputs": {"steps": [2]}},
    "record elsewhere": {"callbacks.upload": {"to": "file://{here}/record"}},
    "lines": {"callbacks.console": {"style": "lines"}},
    "perplexity": {"evaluation": {"interval": 2, "on_load": True, "evaluators": "{held-out}"}},
    "perplexity at the end": {"evaluation": {"evaluators": "{held-out}"}},
    "compiled": {"training.torch_compile": True, "training.torch_compile_backend": "eager"},
}
FEATURES = MODEL | DATA | OPTIMIZER | SCHEDULE | LOSS | SAVING | LENGTH | BESIDE

REFUSED: set[frozenset[str]] = set()
"""Pairs that the product refuses, always in words."""


def exclude(one: str, *others: str) -> None:
    """Note that `one` goes with none of the others."""
    REFUSED.update(frozenset((one, other)) for other in others)


def keys_meet(one: Settings, other: Settings) -> bool:
    """Whether both set the same key, or a part of what the other sets."""
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in one for b in other)


exclude("mix", "random offsets", "label masks")
exclude("file order", "permutation", "random offsets")
exclude("random offsets", "an epoch")
exclude("stops early", "so many steps")
exclude("compiled", "outputs")
exclude("going back", "logged by tokens")
for other_optimizer in ("adafactor", "sgd", "schedule free"):
    exclude(other_optimizer, "lion", "muon", "selective updates", "updates on record")
exclude("muon", "selective updates", "updates on record")


def may_meet(one: str, other: str) -> bool:
    """Whether two features are no choices for one setting."""
    return one != other and not keys_meet(FEATURES[one], FEATURES[other])


def goes_with(one: str, other: str) -> bool:
    """Whether a run may have both features."""
    return may_meet(one, other) and frozenset((one, other)) not in REFUSED


PAIRS = [pair for pair in itertools.combinations(FEATURES, 2) if may_meet(*pair)]


def prepare(here: Path) -> Path:
    """Everything that the features name; returns the configuration of the run without any of them."""
    config = runs.write_run(here, dropout=0.1, label_masks=True, max_duration=5, save_interval=4)
    tree = yaml.safe_load(config.read_text())
    del tree["data"]["label_mask_paths"]  # a feature
    config.write_text(yaml.safe_dump(tree))
    np.random.default_rng(2).integers(0, 100, 16 * 30, dtype=np.uint16).tofile(here / "more.npy")
    words = {"<eos>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, 100)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(here / "tokenizer")
    torch.manual_seed(3)
    shape = tree["model"]["config"] | {"max_position_embeddings": 16}
    Olmo2ForCausalLM(Olmo2Config(**shape)).save_pretrained(here / "published")
    return config


def _filled(value: Any, here: Path) -> Any:
    if value == "{held-out}":
        data = {"paths": [f"{here}/more.npy"], "token_dtype": "uint16", "sequence_length": 16}
        return [{"label": "held-out", "data": data}]
    if isinstance(value, str):
        return value.replace("{here}", str(here))
    if isinstance(value, list):
        return [_filled(one, here) for one in value]
    return {key: _filled(one, here) for key, one in value.items()} if isinstance(value, dict) else value


def write(config: Path, here: Path, names: Iterable[str], target: Path, **training: Any) -> Path:
    """The configuration with these features on.

    Args:
        config: what `prepare` returned.
        here: its directory.
        names: features, no two of which are choices for one setting.
        target: the file to write.
        training: further settings of the `training` section.
    """
    tree = yaml.safe_load(config.read_text())
    for name in names:
        for key, value in FEATURES[name].items():
            *sections, last = key.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[last] = _filled(value, here)
    tree["training"].update(training)
    target.write_text(yaml.safe_dump(tree))
    return target


def drawn(seed: int, *, begin: Iterable[str] = (), without: Iterable[str] = ()) -> list[str]:
    """A random set of features that go together, about half of all there is room for.

    Args:
        seed: the same one gives the same set.
        begin: features that it has in any case.
        without: features that it has in no case.
    """
    draw, chosen = random.Random(seed), list(begin)
    order = [name for name in FEATURES if name not in set(without)]
    draw.shuffle(order)
    for name in order:
        if draw.random() < 0.5 and all(
            may_meet(name, one) and frozenset((name, one)) not in REFUSED for one in chosen
        ):
            chosen.append(name)
    return chosen
