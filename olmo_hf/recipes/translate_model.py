"""The model and tokenizer of an original configuration in our words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from olmo_hf.errors import ConversionError, last_line
from olmo_hf.model.activation_checkpointing import STRATEGIES
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.conversion.architecture import ORIGINAL_DEFAULTS, RUNTIME_FIELDS, config_from_original
from olmo_hf.model.presets import PRESETS, preset_fields
from olmo_hf.recipes.ledger import Ledger

# Where a key of the original goes that has a field of its own; the others shape several fields together.
_SAME_MEANING = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "clip_qkv": "clip_qkv",
    "rope_full_precision": "rope_full_precision",
    "alibi_bias_max": "alibi_bias_max",
    "layer_norm_with_affine": "norm_affine",
    "layer_norm_eps": "rms_norm_eps",
    "attention_layer_norm": "qk_norm",
    "attention_layer_norm_with_affine": "qk_norm_affine",
    "embedding_layer_norm": "embedding_norm",
    "attention_dropout": "attention_dropout",
    "residual_dropout": "residual_dropout",
    "embedding_dropout": "embedding_dropout",
    "scale_logits": "scale_logits",
    "weight_tying": "tie_word_embeddings",
    "init_fn": "init_method",
    "init_std": "initializer_range",
    "init_cutoff_factor": "init_cutoff_factor",
    "emb_init_std": "embedding_initializer_range",
    "scale_emb_init": "scale_embedding_init",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "embedding_size": "vocab_size",
    "vocab_size": "tokenizer_vocab_size",
    "max_sequence_length": "max_position_embeddings",
    "bias_for_layer_norm": "norm_bias",
}
_SHAPED = {
    "mlp_ratio": "intermediate_size",
    "mlp_hidden_size": "intermediate_size",
    "activation_type": "hidden_act",
    "multi_query_attention": "num_key_value_heads",
    "alibi": "position_embedding",
    "rope": "position_embedding",
    "rope_theta": "rope_parameters",
    "layer_norm_type": "norm_type",
    "norm_after": "norm_position",
    "include_bias": "attention_bias",
}
_LAYOUT = ("block_type", "block_group_size")
_BUNDLED_TOKENIZERS = {
    "tokenizers/allenai_dolma2.json": "allenai/dolma2-tokenizer",
    "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json": "allenai/gpt-neox-olmo-dolma-v1_5",
    "tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json": "allenai/eleuther-ai-gpt-neox-20b-pii-special",
}
_MOST_REFINEMENTS = 3


def translate_model(ledger: Ledger, model: Mapping[str, Any]) -> OlmoHfConfig | None:
    """Sets `model.*` and returns the architecture; None where there is none."""
    known = {name: value for name, value in model.items() if name in ORIGINAL_DEFAULTS}
    for name in model:
        if name not in ORIGINAL_DEFAULTS:
            ledger.refuse(f"model.{name}", "the original's model has no such key")
    broken = [verdict.key for verdict in ledger.refused() if verdict.key.removeprefix("model.") in ORIGINAL_DEFAULTS]
    if broken:
        for name in known:
            ledger.refuse(f"model.{name}", f"there is no model while {', '.join(broken)} is refused")
        return None
    try:
        config, _ = config_from_original(known)
    except (ConversionError, StrictDataclassError, ValueError, TypeError) as error:
        for name in known:
            ledger.refuse(f"model.{name}", f"the model as a whole cannot be expressed: {last_line(error)}")
        return None
    _write(ledger, config)
    for name, value in known.items():
        _judge(ledger, name, value, config)
    if "flash_attention" not in known:
        ledger.put("model.attn_implementation", "sdpa", "the original's default of model.flash_attention")
    return config


def translate_tokenizer(ledger: Ledger) -> None:
    """Sets `model.tokenizer`."""
    identifier = ledger.value("tokenizer.identifier")
    if "tokenizer.identifier" not in ledger.given or identifier is None:
        ledger.no_effect("tokenizer.identifier", "no tokenizer is named; checkpoints are saved without one")
    elif identifier in _BUNDLED_TOKENIZERS and not Path(identifier).exists():
        note = "a file that came with the original and is not here; the hub has the same tokenizer under this name"
        ledger.translate("tokenizer.identifier", "model.tokenizer", _BUNDLED_TOKENIZERS[identifier], note)
    else:
        ledger.keep("tokenizer.identifier", "model.tokenizer")
    ledger.no_effect("tokenizer.truncate_direction", "token files hold tokens; nothing is truncated in training")


def translate_activation_checkpointing(ledger: Ledger) -> None:
    """Sets `model.activation_checkpointing`; the original's older files say true or false."""
    key, ours = "activation_checkpointing", "model.activation_checkpointing"
    value = ledger.value(key)
    if isinstance(value, bool):
        ledger.translate(key, ours, "whole_layer" if value else None, "older spelling")
    elif value is None or value in STRATEGIES:
        ledger.keep(key, ours)
    else:
        ledger.refuse(key, f"there is no such strategy here; choose one of {', '.join(STRATEGIES)}")


def _write(ledger: Ledger, config: OlmoHfConfig) -> None:
    """The shortest of: a preset, a preset with a few refinements, the fields that differ from our defaults."""
    fields = config.to_init_dict()
    if not config.qk_norm:
        del fields["qk_norm_affine"]  # says nothing then
    best: tuple[str, dict[str, Any]] | None = None
    for name in PRESETS:
        base = OlmoHfConfig(**preset_fields(name)).to_init_dict()
        differing = {key: value for key, value in fields.items() if base[key] != value}
        if best is None or len(differing) < len(best[1]):
            best = name, differing
    assert best is not None
    if len(best[1]) <= _MOST_REFINEMENTS:
        ledger.settings["model.preset"] = best[0]
        changes = best[1]
    else:
        base = OlmoHfConfig().to_init_dict()
        changes = {key: value for key, value in fields.items() if base[key] != value}
    for key, value in changes.items():
        ledger.settings[f"model.config.{key}"] = value


def _judge(ledger: Ledger, name: str, value: Any, config: OlmoHfConfig) -> None:
    key = f"model.{name}"
    if name == "flash_attention":
        note = "flash attention where the package is installed, else sdpa, as the original" if value else "no flash"
        ledger.translate(key, "model.attn_implementation", "auto" if value else "sdpa", note)
    elif name in RUNTIME_FIELDS:
        ledger.no_effect(key, "where and in which precision a model lives is decided at launch")
    elif name == "attention_layer_norm_with_affine" and not config.qk_norm:
        ledger.no_effect(key, "attention_layer_norm is off")
    elif name in _LAYOUT:
        ledger.no_effect(key, "decides the original's tensor names, not its mathematics")
    else:
        field = _SAME_MEANING.get(name) or _SHAPED[name]
        same = name in _SAME_MEANING and getattr(config, field) == value
        ours = f"model.config.{field}"
        held = ours if ours in ledger.settings else f"model.preset ({field})" if _has_preset(ledger) else ours
        ledger.judge(key, "kept" if same else "translated", held, "" if same else f"{getattr(config, field)}")


def _has_preset(ledger: Ledger) -> bool:
    return "model.preset" in ledger.settings
