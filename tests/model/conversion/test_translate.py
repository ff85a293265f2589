"""Tables of tensors under other names."""

import pytest
import torch

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.lazy import from_memory
from olmo_hf.model.conversion.tensor_names import tensor_table
from olmo_hf.model.conversion.translate import (
    optimizer_to_original,
    optimizer_to_ours,
    weights_to_original,
    weights_to_ours,
)
from tests.model.tiny import SHAPES, tiny_config, tiny_model


def read(table):
    return {name: tensor.read() for name, tensor in table.items()}


@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back(shape):
    model = tiny_model(**SHAPES[shape])
    weights, entries = from_memory(dict(model.named_parameters())), tensor_table(model.config)
    back = read(weights_to_ours(weights_to_original(weights, entries), entries))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name].read()) for name in back)


@pytest.mark.parametrize(("change", "words"), [("missing", "1 tensors are missing"), ("extra", "have no place")])
def test_tensors_too_few_or_too_many(change, words):
    model = tiny_model()
    entries = tensor_table(model.config)
    original = weights_to_original(from_memory(dict(model.named_parameters())), entries)
    if change == "missing":
        original.pop("transformer.wte.weight")
    else:
        original["transformer.wpe.weight"] = original["transformer.wte.weight"]
    with pytest.raises(ConversionError, match=words):
        weights_to_ours(original, entries)


def test_another_length_than_the_configuration_says():
    entries = tensor_table(tiny_config())
    original = from_memory({entry.original: torch.zeros(sum(entry.rows) + 1, 2) for entry in entries})
    with pytest.raises(ConversionError, match="expected 128 rows"):
        weights_to_ours(original, entries)


def test_optimizer_numbers_that_differ_have_no_fused_counterpart():
    model = tiny_model()
    entries = tensor_table(model.config)
    state = {f"{name}.step": torch.tensor(3.0) for name, _ in model.named_parameters()}
    fused = read(optimizer_to_original(from_memory(state), entries))
    assert fused["transformer.blocks.0.att_proj.weight.step"] == 3.0
    state["model.layers.0.self_attn.k_proj.weight.step"] = torch.tensor(4.0)
    with pytest.raises(ConversionError, match="step differs among"):
        optimizer_to_original(from_memory(state), entries)
    state.pop("model.layers.0.self_attn.k_proj.weight.step")
    with pytest.raises(ConversionError, match=r"k_proj\.weight: no optimizer state step"):
        optimizer_to_original(from_memory(state), entries)


def test_clipping_memory_of_fused_tensors_is_left_behind_and_said():
    entries = tensor_table(tiny_config())
    name = "transformer.blocks.0.att_proj.weight"
    state = {f"{name}.exp_avg": torch.zeros(96, 32), f"{name}.grad_norm_exp_avg": torch.tensor(0.5)}
    table, notices = optimizer_to_ours(from_memory(state), entries)
    assert sorted(table) == [f"model.layers.0.self_attn.{part}_proj.weight.exp_avg" for part in "kqv"]
    assert "running norms of adaptive clipping (1 numbers" in notices[0]
    with pytest.raises(ConversionError, match=r"x\.exp_avg: optimizer state of an unknown parameter"):
        optimizer_to_ours(from_memory({"x.exp_avg": torch.zeros(2)}), entries)
