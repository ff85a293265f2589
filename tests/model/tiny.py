"""A model small enough for any test: 2 layers, width 32, fp32, seed 0."""

from typing import Any

import torch

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # large enough that wrong attention shows in the logits
}

OLMO1: dict[str, Any] = {
    "norm_type": "layer",
    "norm_position": "pre",
    "norm_affine": False,
    "rms_norm_eps": 1e-5,
    "qk_norm": False,
    "rope_theta": 10_000.0,
}

# Shapes that differ wherever a forward pass, a cache or a file could go wrong.
SHAPES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "olmo2_gqa": {"num_key_value_heads": 2},
    "olmo2_tied": {"tie_word_embeddings": True},
    "olmo2_attention_bias": {"attention_bias": True},
    "olmo1": OLMO1,
    "olmo1_clip": OLMO1 | {"clip_qkv": 0.5},
    "alibi": {"position_embedding": "alibi"},
    "learned": {"position_embedding": "learned"},
    "all_extras": {
        "attention_bias": True,
        "mlp_bias": True,
        "lm_head_bias": True,
        "norm_bias": True,
        "embedding_norm": True,
        "scale_logits": True,
        "mlp_gated": False,
        "hidden_act": "gelu",
        "norm_position": "pre",
        "norm_type": "layer",
        "num_key_value_heads": 1,
    },
}


def tiny_config(**changes: Any) -> OlmoHfConfig:
    return OlmoHfConfig(**(TINY | changes))


def tiny_model(**changes: Any) -> OlmoHfForCausalLM:
    """Evaluation mode. Norm weights and biases are moved off 1 and 0, so that none can be left out unseen."""
    torch.manual_seed(0)
    model = OlmoHfForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def token_ids(rows: int, length: int, seed: int = 1, vocab_size: int = 128) -> torch.Tensor:
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
