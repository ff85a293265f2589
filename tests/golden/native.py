"""Weights under the original trainer's names, as a checkpoint directory that this package loads."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

WHOLE = {
    "attn_out.weight": "self_attn.o_proj.weight",
    "q_norm.weight": "self_attn.q_norm.weight",
    "k_norm.weight": "self_attn.k_norm.weight",
    "attn_norm.weight": "post_attention_layernorm.weight",
    "ff_norm.weight": "post_feedforward_layernorm.weight",
    "ff_out.weight": "mlp.down_proj.weight",
}
TOP = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "transformer.ff_out.weight": "lm_head.weight",
}
SPLIT = {
    "att_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "ff_proj.weight": ("mlp.up_proj.weight", "mlp.gate_proj.weight"),
}


def to_hf(native: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """OLMo-2 weights (all heads with their own keys and values) under Hugging Face's names."""
    weights = {}
    for name, tensor in native.items():
        if name in TOP:
            weights[TOP[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest in WHOLE:
            weights[f"model.layers.{layer}.{WHOLE[rest]}"] = tensor
        else:
            for part, target in zip(tensor.chunk(len(SPLIT[rest])), SPLIT[rest], strict=True):
                weights[f"model.layers.{layer}.{target}"] = part.contiguous()
    return weights


def parts_of(native_name: str) -> list[str]:
    """Hugging Face's names of what one native tensor holds, in order."""
    name = native_name.removeprefix("module.")
    if name in TOP:
        return [TOP[name]]
    _, _, layer, rest = name.split(".", 3)
    return [f"model.layers.{layer}.{part}" for part in (SPLIT[rest] if rest in SPLIT else (WHOLE[rest],))]


def olmo2_config(model: dict[str, Any]) -> OlmoHfConfig:
    """The configuration of a native OLMo-2 model without grouped heads."""
    return OlmoHfConfig(
        vocab_size=model["embedding_size"],
        hidden_size=model["d_model"],
        intermediate_size=model["mlp_hidden_size"] // 2,
        num_hidden_layers=model["n_layers"],
        num_attention_heads=model["n_heads"],
        max_position_embeddings=model["max_sequence_length"],
        rms_norm_eps=model["layer_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": float(model["rope_theta"])},
        tie_word_embeddings=model["weight_tying"],
        eos_token_id=model["eos_token_id"],
        pad_token_id=model["pad_token_id"],
    )


def save_as_checkpoint(weights_file: Path, model: dict[str, Any], directory: Path) -> None:
    """Write the native weights as a model directory."""
    ours = OlmoHfForCausalLM(olmo2_config(model))
    ours.load_state_dict(to_hf(load_file(weights_file)), strict=True)
    ours.save_pretrained(directory)
