"""The common tests of transformers for causal language models, for our class.

The installed package does not ship its `tests/` (`test_modeling_common.py`, `generation/test_utils.py`,
`causal_lm_tester.py`, `test_configuration_common.py`), so the same set stands here, name by name. Those that need
nothing new are elsewhere:

| transformers' common test | here |
|---|---|
| save_load, load_contiguous_weights, can_use_safetensors | test_saving: weights, shards; below |
| tied_weights_keys, load_save_without_tied_weights, weights_reload_no_missing_tied_weights | test_saving: tied heads |
| resize_tokens_embeddings, resize_embeddings_untied | test_saving: resize |
| can_be_initialized_on_meta, init_weights_can_init_buffers, all_tensors_are_parameter_or_buffer | test_saving: meta |
| model_outputs_equivalence, hidden_states_output, attention_outputs | test_modeling |
| inputs_embeds, inputs_embeds_matches_input_ids, forward_with_logits_to_keep | test_generation: inputs_embeds |
| eager_matches_sdpa_inference, sdpa_can_dispatch_non_composite_models | test_modeling: eager_and_sdpa; below |
| training_gradient_checkpointing and its reentrant variants | test_activation_checkpointing |
| torch_compile_for_training, torch_export | test_compile_export; dynamic shapes below |
| flex_attention_with_grads, flash_attn_N_inference_equivalence, flash padding-free | test_gpu, on a GPU |
| tp_plan | test_tensor_parallel |
| greedy, sample, beam search, left_padding_compatibility, static cache, assisted decoding | test_generation |
| model_rope_scaling_from_config, model_rope_scaling_frequencies | test_modeling: stretched_rope |
| ConfigTester: common properties, to_json, save and load, without parameters | test_configuration; below |
| pipeline tests | test_generation: pipeline |

Without a meaning for this model: encoder-decoder, composite and vision tests, sliding windows, feed-forward chunking,
fp32 modules to keep, quantised caches (other packages), sequence classification (stock's class, tested below).
"""

import inspect
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, StaticCache

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM, OlmoHfModel
from tests.model.tiny import SHAPES, tiny_config, tiny_model, token_ids

IDS = token_ids(2, 12)


@pytest.mark.parametrize("shape", SHAPES)
def test_determinism_and_batching_equivalence(shape):
    model = tiny_model(**SHAPES[shape])
    batch = model(IDS).logits
    assert torch.equal(model(IDS).logits, batch)
    rows = torch.cat([model(row[None]).logits for row in IDS])
    torch.testing.assert_close(rows, batch, atol=1e-5, rtol=0)  # matrix kernels differ with the number of rows


@pytest.mark.parametrize("shape", SHAPES)
def test_training_reaches_every_parameter(shape):
    model = tiny_model(**SHAPES[shape]).train()
    model(IDS, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        # A bias that is added to all keys of a query shifts all scores alike: its gradient is rounding only.
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("shape", ["olmo2", "olmo1", "alibi"])
def test_training_overfits_one_batch(shape):
    torch.manual_seed(0)
    model = tiny_model(**SHAPES[shape]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(40):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 < 2.0 < losses[0]


def test_forward_signature_and_main_input_name():
    names = list(inspect.signature(OlmoHfForCausalLM.forward).parameters)
    assert names[1:3] == ["input_ids", "attention_mask"]
    assert OlmoHfForCausalLM.main_input_name == "input_ids"


def test_gradients_reach_hidden_states_and_attentions():
    model = tiny_model()
    model.set_attn_implementation("eager")
    out = model(IDS, output_hidden_states=True, output_attentions=True)
    watched = [out.hidden_states[0], out.attentions[0]]
    for tensor in watched:
        tensor.retain_grad()
    out.logits.flatten()[0].backward(retain_graph=True)
    assert all(tensor.grad is not None for tensor in watched)


def test_get_and_set_embeddings():
    model = tiny_model()
    assert isinstance(model.get_input_embeddings(), nn.Embedding)
    assert model.get_output_embeddings() is model.lm_head
    other, head = nn.Embedding(10, 32), nn.Linear(32, 10, bias=False)
    model.set_input_embeddings(other)
    model.set_output_embeddings(head)
    assert model.model.embed_tokens is other
    assert model(IDS % 10).logits.shape == (2, 12, 10)


def test_input_require_grads_for_adapters():
    model = tiny_model().train()
    model.requires_grad_(False)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable()
    out = model(IDS, labels=IDS)
    assert out.loss.requires_grad
    out.loss.backward()
    model.disable_input_require_grads()


def test_weights_missing_from_a_file_are_initialised_by_the_rule(tmp_path):
    """`can_init_all_missing_weights` and `correct_missing_keys`: from the bare model only the head is missing."""
    config = tiny_config(vocab_size=2000, initializer_range=0.05)
    OlmoHfModel(config).save_pretrained(tmp_path)
    loaded, info = OlmoHfForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"lm_head.weight"}
    assert loaded.lm_head.weight.std().item() == pytest.approx(0.05, rel=0.02)
    empty = OlmoHfForCausalLM.from_pretrained(None, config=config, state_dict={})
    assert torch.equal(empty.model.norm.weight, torch.ones(32))
    assert empty.model.layers[1].mlp.up_proj.weight.std().item() == pytest.approx(0.05, rel=0.1)


def test_mismatched_shapes_are_an_error_or_are_initialised(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?i)mismatch"):
        OlmoHfForCausalLM.from_pretrained(tmp_path, vocab_size=64)
    loaded, info = OlmoHfForCausalLM.from_pretrained(
        tmp_path, vocab_size=64, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {key[0] for key in info["mismatched_keys"]} == {"lm_head.weight", "model.embed_tokens.weight"}
    assert loaded.lm_head.weight.std().item() == pytest.approx(0.2, rel=0.1)


def test_weights_that_are_not_contiguous_are_saved(tmp_path):
    model = tiny_model()
    turned = model.lm_head.weight.detach().T.contiguous().T
    model.lm_head.weight = nn.Parameter(turned)
    assert not model.lm_head.weight.is_contiguous()
    model.save_pretrained(tmp_path)
    assert torch.equal(OlmoHfForCausalLM.from_pretrained(tmp_path).lm_head.weight, turned)


def test_device_contexts(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with torch.device("cpu"):
        loaded = OlmoHfForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    with torch.device("meta"), pytest.raises(RuntimeError, match=r"(?i)meta"):
        OlmoHfForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("shape", ["olmo2_tied", "all_extras"])
def test_layers_offloaded_to_disk(tmp_path, shape):
    model = tiny_model(**SHAPES[shape])
    model.save_pretrained(tmp_path / "model")
    where = {name: "cpu" for name, _ in model.model.named_children() if name != "layers"}
    device_map = {f"model.{name}": device for name, device in where.items()} | {"lm_head": "cpu"}
    device_map |= {"model.layers.0": "disk", "model.layers.1": "cpu"}
    loaded = OlmoHfForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=str(tmp_path / "offload")
    ).eval()
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_one_configuration_for_all_parts():
    model = tiny_model()
    assert all(part.config is model.config for part in model.modules() if hasattr(part, "config"))
    model.config._attn_implementation = "eager"
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_padding_free_rows_by_position_ids(attn_implementation):
    """Restarting `position_ids` without a mask and a cache keep documents apart, as in every model of transformers."""
    model = tiny_model(num_key_value_heads=2)
    model.set_attn_implementation(attn_implementation)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(IDS[:1], position_ids=positions, use_cache=False).logits[0]
    alone = torch.cat([model(part[None]).logits[0] for part in IDS[0].split([5, 7])])
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_custom_4d_mask_shares_a_prefix(dtype):
    """Two continuations of one prefix in one row, each blind to the other."""
    model = tiny_model(num_key_value_heads=2)
    prefix, (first, second) = IDS[0, :5], (IDS[0, 5:8], IDS[1, 5:8])
    row = torch.cat([prefix, first, second])[None]
    mask = torch.ones(11, 11, dtype=torch.bool).tril()
    mask[8:, 5:8] = False
    given = mask[None, None]
    if dtype != torch.bool:
        given = torch.zeros(1, 1, 11, 11).masked_fill(~mask, torch.finfo(dtype).min)
    positions = torch.tensor([[*range(8), 5, 6, 7]])
    logits = model(row, attention_mask=given, position_ids=positions).logits[0]
    for continuation, places in ((first, slice(5, 8)), (second, slice(8, 11))):
        alone = model(torch.cat([prefix, continuation])[None]).logits[0, 5:]
        torch.testing.assert_close(logits[places], alone, atol=1e-5, rtol=0)


def generate(model, ids=None, **options):
    return model.generate(ids, **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | options)


@pytest.mark.parametrize("shape", ["olmo2_gqa", "alibi", "learned"])
def test_generate_variants(shape):
    model = tiny_model(**SHAPES[shape])
    expected = generate(model, IDS)
    out = generate(model, IDS, return_dict_in_generate=True, output_scores=True, output_hidden_states=True)
    assert torch.equal(out.sequences, expected)
    assert torch.equal(torch.stack(out.scores, 1).argmax(-1), expected[:, 12:])
    assert len(out.hidden_states) == 8
    assert len(out.hidden_states[0]) == model.config.num_hidden_layers + 1
    embeds = model.get_input_embeddings()(IDS)
    assert torch.equal(generate(model, inputs_embeds=embeds), expected[:, 12:])
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(model, inputs_embeds=embeds, **static), expected[:, 12:])
    assert torch.equal(generate(model, IDS[:1], prompt_lookup_num_tokens=2), expected[:1])


@pytest.mark.parametrize("shape", ["olmo2_gqa", "alibi"])
def test_generate_continues_from_past_key_values(shape):
    model = tiny_model(**SHAPES[shape])
    expected = generate(model, IDS)
    begun = generate(model, IDS, max_new_tokens=3, return_dict_in_generate=True)
    going_on = generate(model, begun.sequences, past_key_values=begun.past_key_values, max_new_tokens=5)
    assert torch.equal(going_on, expected)


def test_beam_sampling_and_several_answers():
    model = tiny_model(tokenizer_vocab_size=100)
    torch.manual_seed(0)
    out = generate(model, IDS % 100, do_sample=True, num_beams=3, num_return_sequences=2)
    assert out.shape == (4, 20)
    assert out.max() < 100


def test_generate_without_input():
    model = tiny_model(bos_token_id=3)
    assert generate(model)[0, 0] == 3
    with pytest.raises(ValueError, match="bos_token_id"):
        generate(tiny_model())


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("shape", ["olmo2_gqa", "olmo1_clip", "alibi", "learned"])
def test_left_padding_with_a_static_cache(shape, options):
    model, mask = tiny_model(**SHAPES[shape]), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    static = {"cache_implementation": "static", "disable_compile": True}
    batch = generate(model, IDS, attention_mask=mask, **static, **options)
    for row, start in enumerate((5, 0)):
        alone = generate(model, IDS[row : row + 1, start:], **options)
        assert torch.equal(batch[row, 12:], alone[0, 12 - start :])


def test_more_tokens_than_learned_positions_are_refused_not_made_up():
    model = tiny_model(**SHAPES["learned"])  # 64 positions
    assert model(token_ids(1, 64)).logits.shape == (1, 64, 128)
    with pytest.raises(ValueError, match="64 learned positions"):
        model(token_ids(1, 65))
    with pytest.raises(ValueError, match="65 tokens, but there are 64 learned positions"):
        generate(model, token_ids(1, 60), max_new_tokens=10)


def test_decoding_with_a_static_cache_is_one_graph():
    """What `generate` compiles on a GPU."""
    torch._dynamo.reset()
    model = tiny_model(num_key_value_heads=2)
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(IDS, past_key_values=cache)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        step = compiled(IDS[:, :1], past_key_values=cache, position_ids=torch.tensor([[12]])).logits
    expected = model(torch.cat([IDS, IDS[:, :1]], dim=1)).logits[:, -1:]
    torch.testing.assert_close(step, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["olmo2_gqa", "alibi"])
def test_compiled_with_dynamic_shapes(shape):
    torch._dynamo.reset()
    model = tiny_model(**SHAPES[shape])
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for length in (5, 12, 31):
            ids = token_ids(2, length)
            torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, atol=1e-5, rtol=0)


def test_configuration_without_parameters_and_with_common_ones(tmp_path):
    config = OlmoHfConfig()
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (4096, 32, 32)
    config = tiny_config(num_labels=4, id2label={n: f"L{n}" for n in range(4)}, output_hidden_states=True)
    assert json.loads(config.to_json_string())["hidden_size"] == 32
    config.to_json_file(tmp_path / "config.json")
    again = OlmoHfConfig.from_json_file(tmp_path / "config.json")
    assert again.to_dict() == config.to_dict()
    assert (again.num_labels, again.output_hidden_states) == (4, True)


def test_stock_classifier_starts_from_our_checkpoint(tmp_path):
    tiny_model(pad_token_id=0).save_pretrained(tmp_path)
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3, output_loading_info=True)
    assert type(loaded).__name__ == "Olmo2ForSequenceClassification"
    assert info["missing_keys"] == {"score.weight"}
    assert loaded(IDS).logits.shape == (2, 3)
