"""Recomputing activations saves memory and changes no gradient."""

import pytest
import torch

from olmo_hf.errors import ConfigError
from olmo_hf.model.activation_checkpointing import STRATEGIES, apply_activation_checkpointing
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import build_model
from tests.model.tiny import SHAPES, TINY, tiny_model, token_ids

DROPOUT = {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}
SHAPE = TINY | {"num_hidden_layers": 8}
# Which of 8 layers a strategy recomputes as a whole.
LAYERS = {
    "whole_layer": [0, 1, 2, 3, 4, 5, 6, 7],
    "one_in_two": [0, 2, 4, 6],
    "one_in_three": [0, 3, 6],
    "one_in_four": [0, 4],
    "one_in_eight": [0],
    "two_in_three": [1, 2, 4, 5, 7],
    "three_in_four": [1, 2, 3, 5, 6, 7],
    "fine_grained": [],
}


def train(model, steps=3):
    """Three steps of SGD; returns the parameters and the bytes kept for the backward pass of the last step."""
    model.train()
    torch.manual_seed(5)
    optimizer, ids, kept = torch.optim.SGD(model.parameters(), lr=0.1), token_ids(2, 32), {}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for _ in range(steps):
        optimizer.zero_grad()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, sum(kept.values())


def test_every_strategy_of_the_original_is_there():
    assert set(STRATEGIES) == LAYERS.keys()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_after_three_steps_with_dropout(strategy):
    expected, plain_bytes = train(build_model(ModelArgs(config=SHAPE | DROPOUT), seed=0))
    model = build_model(ModelArgs(config=SHAPE | DROPOUT, activation_checkpointing=strategy), seed=0)
    found = [index for index, layer in enumerate(model.model.layers) if layer.gradient_checkpointing]
    assert found == LAYERS[strategy]
    parameters, kept_bytes = train(model)
    for name in expected:
        assert torch.equal(parameters[name], expected[name]), name
    assert kept_bytes < plain_bytes


def test_more_recomputing_keeps_less():
    kept = {}
    for strategy in ("one_in_eight", "one_in_two", "three_in_four", "whole_layer"):
        kept[strategy] = train(build_model(ModelArgs(config=SHAPE, activation_checkpointing=strategy), seed=0), 1)[1]
    assert sorted(kept.values(), reverse=True) == list(kept.values())
    assert len(set(kept.values())) == 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_switch_of_transformers(use_reentrant):
    expected, plain_bytes = train(build_model(ModelArgs(config=SHAPE | DROPOUT), seed=0))
    model = build_model(ModelArgs(config=SHAPE | DROPOUT), seed=0)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()  # as the Trainer does
    assert model.is_gradient_checkpointing
    parameters, kept_bytes = train(model)
    for name in expected:
        assert torch.equal(parameters[name], expected[name]), name
    assert kept_bytes < plain_bytes


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", ["whole_layer", "fine_grained"])
def test_every_architecture(shape, strategy):
    plain, recomputing = tiny_model(**SHAPES[shape]), tiny_model(**SHAPES[shape])
    apply_activation_checkpointing(recomputing, strategy)
    expected, _ = train(plain, steps=1)
    found, _ = train(recomputing, steps=1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_evaluation_and_generation_are_untouched():
    plain, recomputing = tiny_model(), tiny_model()
    apply_activation_checkpointing(recomputing, "fine_grained")
    ids = token_ids(1, 8)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.generate(ids, **options), recomputing.generate(ids, **options))


def test_unknown_strategy():
    with pytest.raises(ConfigError, match="activation_checkpointing: found 'half', expected one of whole_layer"):
        build_model(ModelArgs(config=SHAPE, activation_checkpointing="half"), seed=0)
