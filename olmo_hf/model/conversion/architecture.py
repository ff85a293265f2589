"""The original OLMo trainer's model configuration and ours, translated in both directions.

What one side can say and the other cannot is refused by name. Facts: spec, model.md sections 1 and 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from olmo_hf.errors import ConversionError
from olmo_hf.model.configuration_olmo import OlmoHfConfig

# Every field of the original's model configuration with its default.
ORIGINAL_DEFAULTS: dict[str, Any] = {
    "d_model": 768,
    "n_heads": 12,
    "n_kv_heads": None,
    "multi_query_attention": None,
    "clip_qkv": None,
    "n_layers": 12,
    "mlp_ratio": 4,
    "mlp_hidden_size": None,
    "activation_type": "swiglu",
    "block_type": "sequential",
    "block_group_size": 1,
    "alibi": False,
    "alibi_bias_max": 8.0,
    "rope": False,
    "rope_full_precision": True,
    "rope_theta": 10_000,
    "flash_attention": False,
    "attention_dropout": 0.1,
    "residual_dropout": 0.1,
    "embedding_dropout": 0.1,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "embedding_layer_norm": False,
    "layer_norm_type": "default",
    "layer_norm_with_affine": True,
    "layer_norm_eps": 1e-5,
    "max_sequence_length": 1024,
    "include_bias": True,
    "bias_for_layer_norm": None,
    "scale_logits": False,
    "vocab_size": 50_257,
    "embedding_size": 50_304,
    "weight_tying": True,
    "eos_token_id": 50_256,
    "pad_token_id": 50_256,
    "init_device": None,
    "init_fn": "normal",
    "init_std": 0.02,
    "init_cutoff_factor": None,
    "emb_init_std": None,
    "scale_emb_init": False,
    "norm_after": False,
    "precision": None,
}

# How the original runs, not what it is: flash_attention is attn_implementation here, the others have no counterpart.
RUNTIME_FIELDS = ("flash_attention", "init_device", "precision")

_ACTIVATIONS = {"swiglu": ("silu", True), "gelu": ("gelu", False), "relu": ("relu", False)}
_NORMS = {"default": "layer", "low_precision": "low_precision_layer", "rms": "rms"}


@dataclass(frozen=True)
class OriginalLayout:
    """What decides the original's tensor names but not its mathematics."""

    separate_qkv: bool = False
    """The `llama` block: q_proj, k_proj, v_proj instead of one att_proj."""
    block_group_size: int = 1
    """Above 1, blocks are named `block_groups.G.J`."""


def config_from_original(model: Mapping[str, Any]) -> tuple[OlmoHfConfig, OriginalLayout]:
    """Translate the `model` section of an original `config.yaml`; fields it leaves out have the original's defaults.

    Raises:
        ConversionError: unknown fields, or a combination that the original itself refuses or crashes on.
    """
    unknown = sorted(model.keys() - ORIGINAL_DEFAULTS.keys())
    if unknown:
        raise ConversionError(f"model: unknown fields {', '.join(unknown)}; remove those that change no tensor")
    given = ORIGINAL_DEFAULTS | dict(model)
    layout = OriginalLayout(given["block_type"] == "llama", given["block_group_size"])
    hidden_act, gated = _lookup(_ACTIVATIONS, "activation_type", given)
    inner = given["mlp_hidden_size"]
    inner = given["mlp_ratio"] * given["d_model"] if inner is None else inner
    bias = given["include_bias"]
    norm_bias = bias if given["bias_for_layer_norm"] is None else given["bias_for_layer_norm"]
    # The llama block is always pre-norm; the original ignores norm_after there.
    post = given["norm_after"] and not layout.separate_qkv
    config = OlmoHfConfig(
        vocab_size=given["vocab_size"] if given["embedding_size"] is None else given["embedding_size"],
        tokenizer_vocab_size=given["vocab_size"],
        hidden_size=given["d_model"],
        intermediate_size=inner // 2 if gated else inner,
        num_hidden_layers=given["n_layers"],
        num_attention_heads=given["n_heads"],
        num_key_value_heads=_key_value_heads(given),
        max_position_embeddings=given["max_sequence_length"],
        hidden_act=hidden_act,
        mlp_gated=gated,
        position_embedding=_position_embedding(given),
        rope_parameters={"rope_type": "default", "rope_theta": float(given["rope_theta"])},
        rope_full_precision=given["rope_full_precision"],
        alibi_bias_max=given["alibi_bias_max"],
        norm_type=_lookup(_NORMS, "layer_norm_type", given),
        norm_position="post" if post else "pre",
        norm_affine=given["layer_norm_with_affine"],
        norm_bias=norm_bias,
        rms_norm_eps=float(given["layer_norm_eps"]),
        qk_norm=given["attention_layer_norm"],
        qk_norm_affine=given["attention_layer_norm_with_affine"],
        embedding_norm=given["embedding_layer_norm"],
        clip_qkv=given["clip_qkv"],
        attention_bias=bias,
        mlp_bias=bias,
        lm_head_bias=bias and not given["weight_tying"],
        attention_dropout=given["attention_dropout"],
        residual_dropout=given["residual_dropout"],
        embedding_dropout=given["embedding_dropout"],
        scale_logits=given["scale_logits"],
        tie_word_embeddings=given["weight_tying"],
        init_method=given["init_fn"],
        initializer_range=float(given["init_std"]),
        init_cutoff_factor=given["init_cutoff_factor"],
        embedding_initializer_range=_embedding_std(given),
        scale_embedding_init=given["scale_emb_init"],
        pad_token_id=given["pad_token_id"],
        eos_token_id=given["eos_token_id"],
    )
    return config, layout


def _embedding_std(given: Mapping[str, Any]) -> float | None:
    std: float | None = given["emb_init_std"]
    # The original writes `emb_init_std or ...` for these two.
    return None if std == 0 and given["init_fn"] in ("normal", "mitchell") else std


def config_to_original(config: OlmoHfConfig) -> dict[str, Any]:
    """Translate to the original's model configuration, every field written out, sequential block, no block groups.

    Raises:
        ConversionError: the original has no word for something in `config`; every such field is named.
    """
    problems = list(_untranslatable(config))
    if problems:
        raise ConversionError(f"the original cannot express {'; '.join(problems)}; use --to huggingface")
    activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    norms = {ours: theirs for theirs, ours in _NORMS.items()}
    rope: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
    real = config.vocab_size if config.tokenizer_vocab_size is None else config.tokenizer_vocab_size
    kv_heads = config.key_value_width // config.head_dim
    return ORIGINAL_DEFAULTS | {
        "d_model": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": None if kv_heads == config.num_attention_heads else kv_heads,
        "clip_qkv": config.clip_qkv,
        "n_layers": config.num_hidden_layers,
        "mlp_hidden_size": config.intermediate_size * (2 if config.mlp_gated else 1),
        "activation_type": activations[(config.hidden_act, config.mlp_gated)],
        "alibi": config.position_embedding == "alibi",
        "alibi_bias_max": float(config.alibi_bias_max),
        "rope": config.position_embedding == "rope",
        "rope_full_precision": config.rope_full_precision,
        "rope_theta": int(rope["rope_theta"]),
        "attention_dropout": float(config.attention_dropout),
        "residual_dropout": float(config.residual_dropout),
        "embedding_dropout": float(config.embedding_dropout),
        "attention_layer_norm": config.qk_norm,
        "attention_layer_norm_with_affine": config.qk_norm_affine,
        "embedding_layer_norm": config.embedding_norm,
        "layer_norm_type": norms[config.norm_type],
        "layer_norm_with_affine": config.norm_affine,
        "layer_norm_eps": config.rms_norm_eps,
        "max_sequence_length": config.max_position_embeddings,
        "include_bias": config.attention_bias,
        "bias_for_layer_norm": config.norm_bias,
        "scale_logits": config.scale_logits,
        "vocab_size": real,
        "embedding_size": config.vocab_size,
        "weight_tying": config.tie_word_embeddings,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "init_fn": config.init_method,
        "init_std": config.initializer_range,
        "init_cutoff_factor": config.init_cutoff_factor,
        "emb_init_std": config.embedding_initializer_range,
        "scale_emb_init": config.scale_embedding_init,
        "norm_after": config.norm_position == "post",
    }


def _untranslatable(config: OlmoHfConfig) -> Any:
    rope: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
    if (config.hidden_act, config.mlp_gated) not in _ACTIVATIONS.values():
        yield f"hidden_act {config.hidden_act} with mlp_gated {config.mlp_gated} (it has swiglu, gelu and relu)"
    biases = {config.attention_bias, config.mlp_bias}
    if not config.tie_word_embeddings:
        biases.add(config.lm_head_bias)
    if len(biases) > 1:
        yield "attention_bias, mlp_bias and lm_head_bias that differ (it has one include_bias)"
    if config.position_embedding == "rope" and (
        rope["rope_type"] != "default" or rope["rope_theta"] != int(rope["rope_theta"])
    ):
        yield f"rope_parameters {rope} (it has a whole-number rope_theta only)"
    for name in ("eos_token_id", "pad_token_id"):
        if not isinstance(getattr(config, name), int):
            yield f"{name} {getattr(config, name)} (it needs one id)"
    if config.reset_document_positions:
        yield "reset_document_positions true (its positions go on counting)"


def _lookup(table: Mapping[str, Any], name: str, given: Mapping[str, Any]) -> Any:
    if given[name] not in table:
        raise ConversionError(f"{name}: found {given[name]!r}, expected one of {', '.join(table)}")
    return table[given[name]]


def _position_embedding(given: Mapping[str, Any]) -> Literal["rope", "alibi", "learned"]:
    if given["alibi"] and given["rope"]:
        raise ConversionError("alibi and rope: both are true, which the original refuses; set one to false")
    if given["alibi"]:
        return "alibi"
    return "rope" if given["rope"] else "learned"


def _key_value_heads(given: Mapping[str, Any]) -> int:
    """The original's rule for n_kv_heads and the older multi_query_attention."""
    heads, kv_heads, multi_query = given["n_heads"], given["n_kv_heads"], given["multi_query_attention"]
    if given["block_type"] == "llama" and kv_heads not in (None, heads) and not multi_query:
        raise ConversionError(
            f"n_kv_heads: found {kv_heads} in a llama block, expected n_heads or null (the original crashes)"
        )
    if kv_heads is None:
        return 1 if multi_query else heads
    if multi_query is not None and kv_heads != (1 if multi_query else heads):
        raise ConversionError(
            f"n_kv_heads: found {kv_heads}, which contradicts multi_query_attention {multi_query}; remove one of the "
            "two"
        )
    return kv_heads
