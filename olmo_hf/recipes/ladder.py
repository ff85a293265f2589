"""The original's ladder of small runs, from which losses of large ones are foretold (spec: configs.md section 4).

Everything follows from the number `N` of parameters without the token embedding (the head counts), by the rules of
Porian et al. 2024 (arXiv:2406.19146) for sequences of 2048 tokens: batch 160 (N/108e6)^(2/3) instances, peak learning
rate 0.0047 (N/108e6)^(-1/3), warm-up over N tokens, and a length of k times 20 N tokens, k being the "Chinchilla
multiple".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from olmo_hf.args import RunArgs
from olmo_hf.errors import ConfigError
from olmo_hf.model.build import build_config, load_tokenizer
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.presets import preset_fields
from olmo_hf.model.size import count_parameters

SIZES: dict[str, tuple[int, int, int]] = {
    "4M": (64, 8, 8),
    "6M": (96, 8, 8),
    "8M": (128, 8, 8),
    "10M": (144, 8, 8),
    "14M": (192, 8, 8),
    "16M": (208, 8, 8),
    "20M": (192, 16, 8),
    "60M": (384, 16, 12),
    "90M": (528, 16, 12),
    "150M": (768, 12, 12),
    "300M": (1024, 16, 16),
    "530M": (1344, 16, 16),
    "750M": (1536, 16, 16),
    "1B": (2048, 16, 16),
    "7B": (4096, 32, 32),
}
"""Width, layers, heads. From 150M on as the original's ladder; below as in DataDecide (arXiv:2504.11393)."""

TOKENS_PER_PARAMETER = 20
_SHARDED_FROM_PARAMETERS = 5e9
_INNER = {4096: 11_008}
_REFERENCE_PARAMETERS = 108e6
_REFERENCE_BATCH_TOKENS = 160 * 2048
_REFERENCE_LEARNING_RATE = 0.0047
_OWN_SIZE = re.compile(r"(\d+)x(\d+)x(\d+)")

BASE: dict[str, Any] = {
    "name": "ladder",
    "model": {"preset": "olmo_150m", "tokenizer": "allenai/gpt-neox-olmo-dolma-v1_5"},
    "data": {"mix": "dolma17", "sequence_length": 2048, "num_workers": 16, "prefetch_factor": 8, "pin_memory": True},
    "training": {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "bf16": True, "seed": 6198},
    "callbacks": {"speed_monitor": {}},
    "evaluation": {"interval": 1000},
}
"""What a rung has that does not follow from its size, as plain mappings: the original's choice."""

_RECIPE: dict[str, Any] = {
    "optimizer": "adamw",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.05,
    "decay_norm_and_bias": True,
    "decay_embeddings": True,
    "max_grad_norm": 1.0,
    "z_loss_weight": 0.0,
}


@dataclass(frozen=True)
class Rung:
    """One run of the ladder.

    Attributes:
        size: Name of the size, `150M` or `WIDTHxLAYERSxHEADS`.
        multiple: Length in units of 20 tokens per parameter.
        architecture: Fields of `OlmoHfConfig` that make the size.
        parameters: Without the token embedding.
        learning_rate: At the peak.
        batch_instances: Global batch.
        batch_tokens: The same in tokens.
        warmup_tokens: Length of the warm-up.
        length_tokens: Length of the run.
    """

    size: str
    multiple: float
    architecture: dict[str, int]
    parameters: int
    learning_rate: float
    batch_instances: int
    batch_tokens: int
    warmup_tokens: int
    length_tokens: int

    @property
    def name(self) -> str:
        """As the original names its runs: `150M-2xC`."""
        return f"{self.size}-{self.multiple:g}xC"

    @property
    def steps(self) -> int:
        """Optimizer steps, the last one whole."""
        return -(-self.length_tokens // self.batch_tokens)

    @property
    def launch_file(self) -> str:
        """Of `accelerate_configs/`: weights, gradients and optimizer of the 7B do not fit on every device."""
        return "fsdp2_shard_grad_op.yaml" if self.parameters >= _SHARDED_FROM_PARAMETERS else "ddp.yaml"


def architecture_of(size: str) -> dict[str, int]:
    """Fields of `OlmoHfConfig` of a named size or of `WIDTHxLAYERSxHEADS`.

    Raises:
        ConfigError: There is no such size.
    """
    own = _OWN_SIZE.fullmatch(size)
    named = {name.lower(): name for name in SIZES}
    if own is not None:
        width, layers, heads = (int(number) for number in own.groups())
    elif size.lower() in named:
        width, layers, heads = SIZES[named[size.lower()]]
    else:
        raise ConfigError(f"--sizes: found {size!r}, expected one of {', '.join(SIZES)} or WIDTHxLAYERSxHEADS")
    if min(width, layers, heads) < 1 or width % heads or (width // heads) % 2:
        raise ConfigError(f"--sizes: found {size!r}; expected a width that is an even multiple of the heads, none 0")
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": _INNER.get(width, 4 * width),
    }


def make_rung(
    size: str, multiple: float, *, vocabulary: OlmoHfConfig, sequence_length: int, batch_multiple: int
) -> Rung:
    """Settings of one rung.

    Args:
        size: A name of `SIZES`, or `WIDTHxLAYERSxHEADS`.
        multiple: Chinchilla multiple, above 0.05: the warm-up alone is N tokens.
        vocabulary: An architecture whose vocabulary, head and norms the rung has.
        sequence_length: Tokens of an instance.
        batch_multiple: The global batch is a multiple of so many instances (the original: 32).

    Raises:
        ConfigError: There is no such size, or a number is out of range.
    """
    if not 1 / TOKENS_PER_PARAMETER < multiple < float("inf"):
        raise ConfigError(f"--multiples: found {multiple:g}, expected more than 0.05, of which the warm-up takes 0.05")
    if batch_multiple < 1:
        raise ConfigError(f"--batch-multiple: found {batch_multiple}, expected at least 1")
    architecture = architecture_of(size)
    config = OlmoHfConfig.from_dict(vocabulary.to_dict() | architecture)
    parameters = count_parameters(config).non_embedding
    relative = parameters / _REFERENCE_PARAMETERS
    wanted = _REFERENCE_BATCH_TOKENS * relative ** (2 / 3) / sequence_length
    batch = max(1, round(wanted / batch_multiple)) * batch_multiple
    return Rung(
        size=next((name for name in SIZES if name.lower() == size.lower()), size),
        multiple=multiple,
        architecture=architecture,
        parameters=parameters,
        learning_rate=_REFERENCE_LEARNING_RATE * relative ** (-1 / 3),
        batch_instances=batch,
        batch_tokens=batch * sequence_length,
        warmup_tokens=parameters,
        length_tokens=round(multiple * TOKENS_PER_PARAMETER * parameters),
    )


def vocabulary_of_base(run: RunArgs) -> OlmoHfConfig:
    """The architecture of the base, with the vocabulary of its tokenizer where that is on this machine.

    A tokenizer that is elsewhere is not asked for: a preset of a published model knows its vocabulary.
    """
    tokenizer = None
    if run.model.tokenizer is not None and Path(run.model.tokenizer).exists():
        tokenizer = load_tokenizer(run.model)
    return build_config(run.model, tokenizer=tokenizer, max_position_embeddings=run.data.sequence_length)


def rung_tree(rung: Rung, base: Mapping[str, Any], vocabulary: OlmoHfConfig) -> dict[str, Any]:
    """The configuration of a rung as plain mappings: what follows from its size laid over the base."""
    model, training = dict(base.get("model", {})), dict(base.get("training", {}))
    config = dict(model.get("config", {})) | rung.architecture
    if model.get("preset") == BASE["model"]["preset"]:
        known = preset_fields(model["preset"])
        config = {key: value for key, value in config.items() if known.get(key) != value}
    else:
        config["vocab_size"] = vocabulary.vocab_size
    for key in ("max_duration", "scheduler", "stop_at", "output_dir", "resume"):
        training.pop(key, None)
    per_device = training.get("per_device_train_batch_size", rung.batch_instances)
    fitting = max(n for n in range(1, rung.batch_instances + 1) if rung.batch_instances % n == 0 and n <= per_device)
    training |= _RECIPE | {
        "max_duration": f"{rung.length_tokens}T",
        "global_train_batch_size": rung.batch_instances,
        "per_device_train_batch_size": fitting,
        "learning_rate": float(f"{rung.learning_rate:.6g}"),
        "scheduler": {
            "name": "cosine_with_warmup",
            "units": "tokens",
            "warmup": rung.warmup_tokens,
            "warmup_min_lr": 0.0,
            "alpha_f": 0.01,
        },
    }
    # The original divides by all tokens of the batch, labelled or not.
    training.setdefault("loss_denominator", "batch_tokens")
    tree = dict(base) | {"name": f"{base.get('name', 'ladder')}-{rung.name}", "training": training}
    if config:
        model["config"] = config
    return {key: tree[key] for key in ("name", "data", "training", "callbacks", "evaluation") if key in tree} | {
        "model": model
    }


def header_of(rung: Rung, path: str, launch_file: str) -> str:
    """The comment that opens a rung's file."""
    return (
        f"# A rung of the ladder: {rung.parameters:,} parameters without embeddings, {rung.length_tokens:,} tokens "
        f"({rung.multiple:g} x Chinchilla),\n# {rung.steps:,} steps of {rung.batch_tokens:,} tokens. Written by "
        "`olmo-hf ladder configs`; batch, learning rate, warm-up and length follow\n# from the number of parameters "
        "(Porian et al. 2024, arXiv:2406.19146), the rest from the base.\n#\n"
        f"#   accelerate launch --config_file accelerate_configs/{launch_file} train_hf.py {path}\n\n"
    )
