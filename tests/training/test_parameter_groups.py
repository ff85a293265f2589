"""Who decays: the original's groups name for name, and the OLMo-2 recipe."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM

from olmo_hf.training.parameter_groups import (
    describe_groups,
    parameter_groups,
    parameter_name,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "09_optimizers"
RECORDED = json.loads((GOLDEN / "groups.json").read_text())


def module_with(names):
    """A module tree with exactly these parameter names and the kinds of modules that the original has there."""
    root = nn.Module()
    for name in names:
        *path, kind = name.split(".")
        parent = root
        for part in path[:-1]:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        if path[-1] not in parent._modules:
            leaf = path[-1]
            if leaf in ("wte", "wpe"):
                module = nn.Embedding(4, 3)
            elif "norm" in leaf or leaf == "ln_f":
                module = nn.LayerNorm(3)
            else:
                module = nn.Linear(3, 4)
            module.bias = None
            parent.add_module(leaf, module)
        if kind == "bias":
            parent._modules[path[-1]].bias = nn.Parameter(torch.zeros(4))
    return root


@pytest.mark.parametrize("case", RECORDED, ids=[f"{i}-{case['variant']}" for i, case in enumerate(RECORDED)])
def test_recorded_groups(case):
    flags = {"decay_norm_and_bias": case["decay_norm_and_bias"], "decay_embeddings": case["decay_embeddings"]}
    if case["deprecated_no_decay_norm_and_bias"] is not None:  # as the original's script reads the old flag
        flags = dict.fromkeys(flags, not case["deprecated_no_decay_norm_and_bias"])
    model = module_with([name for group in case["groups"] for name in group["param_names"]])
    groups = parameter_groups(model, weight_decay=0.1, **flags)
    found = [{key: group[key] for key in ("weight_decay", "param_names")} for group in groups]
    assert found == case["groups"]


def test_the_record_covers_all_flags_and_models():
    assert len(RECORDED) == 36
    assert {case["variant"] for case in RECORDED} >= {"olmo2", "tied", "bias_ln", "abs_pos_embnorm", "no_affine"}


def tiny_olmo2(**changes):
    config = Olmo2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=128,
        **changes,
    )
    return Olmo2ForCausalLM(config)


OLMO2 = {"weight_decay": 0.1, "decay_norm_and_bias": True, "decay_embeddings": False}


@pytest.mark.parametrize("tied", [False, True])
def test_the_olmo2_recipe_decays_everything_but_the_embedding(tied):
    model = tiny_olmo2(tie_word_embeddings=tied)
    decayed, kept = parameter_groups(model, **OLMO2)
    assert kept["param_names"] == ["model.embed_tokens.weight"]
    assert {"model.norm.weight", "model.layers.1.self_attn.q_norm.weight"} <= set(decayed["param_names"])
    assert ("lm_head.weight" in decayed["param_names"]) is not tied
    ids = [id(parameter) for group in (decayed, kept) for parameter in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(parameter) for parameter in model.parameters()}


def test_one_step_without_gradient_shrinks_exactly_the_decayed():
    model = tiny_olmo2()
    optimizer = torch.optim.AdamW(parameter_groups(model, **OLMO2), lr=0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if name == "model.embed_tokens.weight" else 0.99
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=1e-9, msg=name)


def test_by_dimension():
    model = tiny_olmo2()
    decayed, kept = parameter_groups(model, **OLMO2, rule="by_dimension")
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    assert all(parameter.ndim == 1 for parameter in kept["params"])
    assert "model.embed_tokens.weight" in decayed["param_names"]


def test_frozen_parameters_are_in_no_group():
    model = tiny_olmo2()
    model.model.embed_tokens.weight.requires_grad_(False)
    (group,) = parameter_groups(model, **OLMO2)
    assert "model.embed_tokens.weight" not in group["param_names"]


def test_names_are_those_of_the_bare_model():
    wrapped = "module._orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight"
    assert parameter_name(wrapped) == "model.layers.0.mlp.up_proj.weight"


def test_groups_are_described_by_name():
    decayed, kept = describe_groups(parameter_groups(tiny_olmo2(), **OLMO2))
    assert decayed[0] == "group 0, weight decay 0.1"
    assert "model.layers.*.self_attn.q_norm.weight (x2)" in decayed[1]
    assert kept == ("group 1, weight decay 0.0", "1 tensor, 4,096 elements: model.embed_tokens.weight")
