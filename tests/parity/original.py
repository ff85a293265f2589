"""Reads what the original OLMo trainer computed (tests/golden/01_model_parity) into models of this package."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from olmo_hf.model.conversion.architecture import OriginalLayout, config_from_original
from olmo_hf.model.conversion.tensor_names import tensor_table
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

GOLDEN = Path(__file__).parents[1] / "golden" / "01_model_parity"


@cache
def index() -> dict[str, Any]:
    return json.loads((GOLDEN / "index.json").read_text())


VARIANTS = [name for name, entry in index().items() if "model_config" in entry]


@dataclass
class Variant:
    """One architecture of the original with its inputs and results."""

    model: OlmoHfForCausalLM
    layout: OriginalLayout
    input_ids: torch.Tensor  # (B, S)
    attention_mask: torch.Tensor | None
    tensors: dict[str, torch.Tensor]
    facts: dict[str, Any]


def load_weights(model: OlmoHfForCausalLM, weights: dict[str, torch.Tensor], layout: OriginalLayout) -> None:
    table = tensor_table(model.config, layout)
    assert {entry.original for entry in table} == weights.keys()
    ours = {name: part for entry in table for name, part in entry.split(weights[entry.original]).items()}
    missing, unexpected = model.load_state_dict(ours, strict=False)
    assert set(missing) <= ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert not unexpected


def load_variant(name: str, attn_implementation: str = "sdpa") -> Variant:
    facts = index()[name]
    config, layout = config_from_original(facts["model_config"])
    config._attn_implementation = attn_implementation
    model = OlmoHfForCausalLM(config).eval()
    stored = load_file(GOLDEN / facts["weights_in"])
    weights = {k.removeprefix("weights."): v for k, v in stored.items() if k.startswith("weights.")}
    load_weights(model, weights, layout)
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    mask = tensors.get("input.attention_mask")
    if "input.attention_bias" in tensors:
        mask = tensors["input.attention_bias"]  # (1 or B, 1, S, S), boolean or additive
    return Variant(model, layout, tensors["input_ids"].long(), mask, tensors, facts)


def queries_with_keys(variant: Variant) -> torch.Tensor:
    """Positions (B, S) where some key may be attended to.

    A query at left padding has none; the original then attends to all places evenly, the future included. These rows
    are nobody's result.
    """
    mask = variant.attention_mask
    if mask is None or mask.ndim == 4:
        return torch.ones_like(variant.input_ids, dtype=torch.bool)
    return mask.cumsum(-1) > 0
