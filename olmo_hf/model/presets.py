"""Named sizes: fields of `OlmoHfConfig` that differ from its defaults. Architecture only, no training settings."""

from typing import Any

from olmo_hf.errors import ConfigError

# The dolma2 tokenizer has 100278 ids, the gpt-neox one of OLMo-1 50280; embeddings are padded to a multiple of 128.
_DOLMA2 = {"vocab_size": 100_352, "tokenizer_vocab_size": 100_278, "eos_token_id": 100_257, "pad_token_id": 100_277}
# The original's tiny runs name 0 as end of text, which in their tokenizer is a placeholder for redacted addresses.
_NEOX = {"vocab_size": 50_304, "tokenizer_vocab_size": 50_280, "eos_token_id": 50_279, "pad_token_id": 1}

_OLMO2 = {"max_position_embeddings": 4096, "init_cutoff_factor": 3.0}
_OLMO1 = {
    "norm_type": "layer",
    "norm_position": "pre",
    "norm_affine": False,
    "rms_norm_eps": 1e-5,
    "qk_norm": False,
    "init_method": "mitchell",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
_LADDER = {
    "norm_position": "pre",
    "qk_norm": False,
    "init_cutoff_factor": 3.0,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def _size(width: int, layers: int, heads: int, inner: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
    }


FOLLOWS_THE_TOKENIZER = ("olmo2_tiny",)
"""Presets that belong to no published tokenizer: the run's tokenizer decides the size of the vocabulary."""

PRESETS: dict[str, dict[str, Any]] = {
    # A few million parameters for a laptop; without a tokenizer it has room for that of the quickstart.
    "olmo2_tiny": _OLMO2 | _size(192, 4, 6, 512) | {"vocab_size": 4224, "max_position_embeddings": 512},
    "olmo2_1b": _DOLMA2 | _OLMO2 | _size(2048, 16, 16, 8192),
    "olmo2_7b": _DOLMA2 | _OLMO2 | _size(4096, 32, 32, 11_008),
    "olmo2_13b": _DOLMA2 | _OLMO2 | _size(5120, 40, 40, 13_824),
    "olmo2_32b": _DOLMA2 | _OLMO2 | _size(5120, 64, 40, 27_648) | {"num_key_value_heads": 8},
    "olmo1_1b": _NEOX
    | _OLMO1
    | _size(2048, 16, 16, 8192)
    | {"max_position_embeddings": 2048, "tie_word_embeddings": True},
    "olmo1_7b": _NEOX
    | _OLMO1
    | _size(4096, 32, 32, 11_008)
    | {"max_position_embeddings": 2048, "norm_type": "low_precision_layer"},
    "olmo1_7b_0424": _NEOX | _OLMO1 | _size(4096, 32, 32, 11_008) | {"max_position_embeddings": 4096, "clip_qkv": 8.0},
    "olmo1_7b_0724": _NEOX | _OLMO1 | _size(4096, 32, 32, 11_008) | {"max_position_embeddings": 4096, "clip_qkv": 8.0},
    # The small models the original used to tune recipes; the names are its own, the counts are in size.py's tests.
    "olmo_20m": _NEOX | _LADDER | _size(256, 8, 8, 1024),
    "olmo_60m": _NEOX | _LADDER | _size(512, 8, 8, 2048),
    "olmo_150m": _NEOX | _LADDER | _size(768, 12, 12, 3072),
    "olmo_300m": _NEOX | _LADDER | _size(1024, 16, 16, 4096),
    "olmo_700m": _NEOX | _LADDER | _size(1536, 16, 16, 6144),
}


def preset_fields(name: str) -> dict[str, Any]:
    """A fresh copy of the fields of one preset.

    Raises:
        ConfigError: no preset has this name; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ConfigError(f"model.preset: found {name!r}, expected one of {', '.join(PRESETS)}")
    return dict(PRESETS[name])
