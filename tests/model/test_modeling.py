"""Manners of a model of transformers, in the way of its own common tests."""

import copy
import json

import pytest
import torch
from transformers import AutoModel, Olmo2Model, OlmoModel

from olmo_hf.model.modeling_olmo import OlmoHfModel
from tests.model.tiny import SHAPES, tiny_config, tiny_model, token_ids

IDS = token_ids(2, 12)


@pytest.mark.parametrize("shape", SHAPES)
def test_tuple_and_named_outputs_agree(shape):
    model = tiny_model(**SHAPES[shape])
    named = model(IDS, labels=IDS, output_hidden_states=True, use_cache=False)
    loss, logits, hidden_states = model(IDS, labels=IDS, output_hidden_states=True, use_cache=False, return_dict=False)
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
    assert all(torch.equal(a, b) for a, b in zip(hidden_states, named.hidden_states, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_hidden_states_are_layer_inputs_and_the_normed_end(shape):
    model = tiny_model(**SHAPES[shape])
    states = model(IDS, output_hidden_states=True).hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    assert torch.equal(model.compute_logits(states[-1]), model(IDS).logits)
    with torch.no_grad():  # the last layer, by hand
        where = model.model._position_kwargs(states[0], torch.arange(12)[None], None)
        end = model.model.layers[1](states[1], attention_mask=None, **where)
    torch.testing.assert_close(model.model.norm(end), states[-1], atol=1e-6, rtol=0)


def test_attentions_need_eager_and_sum_to_one():
    model = tiny_model(**SHAPES["alibi"])
    model.set_attn_implementation("eager")
    attentions = model(IDS, output_attentions=True).attentions
    assert [a.shape for a in attentions] == [(2, 4, 12, 12)] * 2
    for weights in attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 12), atol=1e-6, rtol=0)
        assert bool((weights.triu(1) == 0).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_eager_and_sdpa_agree(shape):
    model, mask = tiny_model(**SHAPES[shape]), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    results = []
    for attn_implementation in ("sdpa", "eager"):
        model.set_attn_implementation(attn_implementation)
        results.append((model(IDS).logits, model(IDS, attention_mask=mask).logits[mask == 1]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("shape", "stock_class"), [("olmo2", Olmo2Model), ("olmo1", OlmoModel), ("alibi", OlmoHfModel)]
)
def test_the_bare_model(tmp_path, shape, stock_class):
    model = tiny_model(**SHAPES[shape])
    model.save_pretrained(tmp_path / "causal")
    bare, info = OlmoHfModel.from_pretrained(tmp_path / "causal", output_loading_info=True)
    assert not info["missing_keys"]
    expected = model.model(IDS).last_hidden_state
    assert torch.equal(bare.eval()(IDS).last_hidden_state, expected)
    bare.save_pretrained(tmp_path / "bare")
    written = json.loads((tmp_path / "bare" / "config.json").read_text())
    assert written["architectures"] == [stock_class.__name__]
    loaded = AutoModel.from_pretrained(tmp_path / "bare").eval()
    assert type(loaded) is stock_class
    assert torch.equal(loaded(IDS).last_hidden_state, expected)


@pytest.mark.parametrize("name", ["attention_dropout", "residual_dropout", "embedding_dropout"])
def test_dropout_acts_in_training_only(name):
    model = tiny_model(**{name: 0.5})
    plain = tiny_model()
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    model.train()
    torch.manual_seed(0)
    first, second = model(IDS).logits, model(IDS).logits
    assert not torch.equal(first, plain(IDS).logits)
    assert not torch.equal(first, second)


def test_the_gradient_of_the_padding_row_is_kept():
    """Stock transformers zeroes it; the original does not."""
    model = tiny_model(pad_token_id=5)
    model(torch.full((1, 4), 5), labels=torch.full((1, 4), 6)).loss.backward()
    assert model.model.embed_tokens.weight.grad[5].norm() > 0


def test_labels_are_shifted_once():
    """A cyclic sequence and an oracle that names the successor: the loss is 0, not about ln V."""
    ids = torch.arange(16)[None]
    oracle = 100.0 * torch.nn.functional.one_hot((ids + 1) % 128, 128)
    loss = tiny_model().loss_function(logits=oracle, labels=ids, vocab_size=128)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)


def test_a_silent_head_gives_the_entropy_of_the_vocabulary():
    model = tiny_model(tokenizer_vocab_size=100)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    # Padding rows have logits too: the uniform loss is ln 128, not ln 100.
    assert model(IDS, labels=IDS).loss.item() == pytest.approx(4.852030, abs=1e-6)


def test_copies_are_independent():
    model = tiny_model()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert model.lm_head.weight.abs().max() > 0
    assert torch.equal(twin.model.rotary_emb.frequencies, model.model.rotary_emb.frequencies)


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_stretched_rope_equals_transformers(tmp_path, rope_type):
    from transformers import Olmo2ForCausalLM

    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope_type == "linear":
        rope.pop("original_max_position_embeddings")
    model = tiny_model(rope_parameters=rope)
    model.save_pretrained(tmp_path)
    ids = token_ids(2, 60)
    stock = Olmo2ForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(model(ids).logits, stock(ids).logits)
    plain = tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert not torch.equal(model(ids).logits, plain(ids).logits)


def test_layers_can_be_found_by_name_for_sharding():
    assert set(tiny_model()._no_split_modules) == {"OlmoHfDecoderLayer"}
    assert type(tiny_model().model.layers[0]).__name__ == "OlmoHfDecoderLayer"
    assert OlmoHfModel(tiny_config()).config.base_model_tp_plan.keys() >= {"layers.*.self_attn.q_proj"}
