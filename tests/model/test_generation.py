"""Generated text is what the logits say, with every cache and batch."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, Olmo2ForCausalLM, PreTrainedTokenizerFast, pipeline
from transformers.utils import logging

from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests.model.tiny import SHAPES, tiny_model, token_ids

NEW_TOKENS = 12
PROMPT_LENGTHS = (3, 7, 12)


def greedy_without_cache(model, ids, steps=NEW_TOKENS):
    for _ in range(steps):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids


def generate(model, ids, **options):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(ids, **options)


def left_padded(pad_id):
    prompts = [token_ids(1, n, seed=n)[0] for n in PROMPT_LENGTHS]
    longest = max(PROMPT_LENGTHS)
    ids = torch.full((3, longest), pad_id)
    mask = torch.zeros(3, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return prompts, ids, mask


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_with_dynamic_cache(shape, attn_implementation):
    model = tiny_model(**SHAPES[shape])
    model.set_attn_implementation(attn_implementation)
    ids = token_ids(2, 9)
    assert torch.equal(generate(model, ids), greedy_without_cache(model, ids))


@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static", "disable_compile": True},
        {"prefill_chunk_size": 4},
        {"cache_implementation": "static", "prefill_chunk_size": 4, "disable_compile": True},
        {"use_cache": False},
    ],
    ids=["static", "chunked_prefill", "static_chunked", "no_cache"],
)
@pytest.mark.parametrize("shape", ["olmo2_gqa", "olmo1_clip", "alibi", "learned"])
def test_greedy_with_other_caches(shape, options):
    model, ids = tiny_model(**SHAPES[shape]), token_ids(2, 9)
    assert torch.equal(generate(model, ids, **options), greedy_without_cache(model, ids))


@pytest.mark.parametrize("shape", ["olmo2_gqa", "alibi"])
def test_assisted_generation(shape):
    model, ids = tiny_model(**SHAPES[shape]), token_ids(1, 9)
    assistant = tiny_model(num_hidden_layers=1, **SHAPES[shape])
    assert torch.equal(generate(model, ids, assistant_model=assistant), greedy_without_cache(model, ids))


def test_beam_search_equals_transformers(tmp_path):
    model, ids = tiny_model(num_key_value_heads=2), token_ids(2, 9)
    model.save_pretrained(tmp_path)
    stock = Olmo2ForCausalLM.from_pretrained(tmp_path).eval()
    beams = generate(model, ids, num_beams=4)
    assert torch.equal(beams, generate(stock, ids, num_beams=4))
    assert torch.equal(beams, generate(model, ids, num_beams=4, use_cache=False))


def test_sampling_equals_transformers(tmp_path):
    model, ids = tiny_model(), token_ids(2, 9)
    model.save_pretrained(tmp_path)
    stock = Olmo2ForCausalLM.from_pretrained(tmp_path).eval()
    samples = []
    for sampler in (model, stock):
        torch.manual_seed(3)
        samples.append(generate(sampler, ids, do_sample=True, temperature=1.3, top_k=20, top_p=0.9))
    assert torch.equal(*samples)


@pytest.mark.parametrize("shape", ["olmo2", "olmo2_gqa", "olmo1_clip", "alibi", "learned"])
def test_left_padded_batch_equals_each_prompt_alone(shape):
    model = tiny_model(**SHAPES[shape])
    prompts, ids, mask = left_padded(pad_id=1)
    batch = generate(model, ids, attention_mask=mask, max_new_tokens=20)
    for row, prompt in enumerate(prompts):
        alone = generate(model, prompt[None], max_new_tokens=20)
        assert torch.equal(batch[row, -20:], alone[0, -20:]), f"prompt of {len(prompt)} tokens"
    _, other, _ = left_padded(pad_id=77)
    assert torch.equal(generate(model, other, attention_mask=mask, max_new_tokens=20)[:, -20:], batch[:, -20:])


def test_next_token_logits_of_a_left_padded_batch():
    model = tiny_model()
    prompts, ids, mask = left_padded(pad_id=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = model(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
    alone = torch.stack([model(prompt[None]).logits[0, -1] for prompt in prompts])
    torch.testing.assert_close(batch, alone, atol=1e-5, rtol=0)


def test_right_padding_leaves_the_loss_alone():
    model, ids = tiny_model(), token_ids(1, 10)
    padded = torch.cat([ids, torch.full((1, 6), 1)], dim=1)
    mask = (torch.arange(16) < 10).long()[None]
    labels = padded.masked_fill(mask == 0, -100)
    expected = model(ids, labels=ids).loss
    torch.testing.assert_close(model(padded, attention_mask=mask, labels=labels).loss, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_a_row_of_padding_spoils_no_other_row(attn_implementation):
    model, ids = tiny_model(), token_ids(2, 12)
    model.set_attn_implementation(attn_implementation)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1] = 0
    alone = model(ids[:1]).logits[0]
    causal = torch.ones(12, 12, dtype=torch.bool).tril()[None, None].expand(2, 1, 12, 12)
    masks = {
        "int": mask,
        "bool": mask.bool(),
        "float": mask.float(),
        "4d bool": causal & mask.bool()[:, None, None, :],
        "4d float": torch.zeros(2, 1, 12, 12).masked_fill(~(causal & mask.bool()[:, None, None, :]), -1e9),
    }
    for kind, given in masks.items():
        logits = model(ids, attention_mask=given).logits
        torch.testing.assert_close(logits[0], alone, atol=1e-5, rtol=0, msg=kind)
    torch.testing.assert_close(model(ids, attention_mask=None).logits[0], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"do_sample": True, "temperature": 5.0}, {"num_beams": 3}])
def test_padding_ids_are_never_generated(tmp_path, options):
    model = tiny_model(tokenizer_vocab_size=100, max_position_embeddings=600)
    with torch.no_grad():
        model.lm_head.weight[100:].mul_(10)  # make padding ids attractive
    model.save_pretrained(tmp_path)
    stock = Olmo2ForCausalLM.from_pretrained(tmp_path).eval()
    ours = OlmoHfForCausalLM.from_pretrained(tmp_path).eval()
    own_settings = GenerationConfig(max_new_tokens=100, pad_token_id=0, **options)
    torch.manual_seed(0)
    for sampler in (model, ours, stock):
        assert generate(sampler, token_ids(2, 5, vocab_size=100), max_new_tokens=100, **options).max() < 100
        assert sampler.generate(token_ids(2, 5, vocab_size=100), generation_config=own_settings).max() < 100
    free = model.generate(token_ids(2, 5), max_new_tokens=100, pad_token_id=0, suppress_tokens=[], **options)
    assert free.max() >= 100, "without the rule padding ids do appear: the test can fail"


def word_tokenizer():
    """100 words; the model's ids 100 to 127 mean nothing."""
    vocabulary = {"<eos>": 0, "<pad>": 1} | {f"w{n}": n for n in range(2, 100)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def test_pipeline_and_ids_without_a_token():
    model, tokenizer = tiny_model(tokenizer_vocab_size=100, eos_token_id=0, pad_token_id=1), word_tokenizer()
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = generator("w5 w6 w7", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert text.startswith("w5 w6 w7")
    assert isinstance(tokenizer.decode([127, 5]), str)


def test_generation_stops_at_eos_and_knows_it_after_saving(tmp_path, caplog):
    model = tiny_model(eos_token_id=9, pad_token_id=8, lm_head_bias=True)
    with torch.no_grad():
        model.lm_head.bias[9] = 100.0
    model.save_pretrained(tmp_path)
    loaded = OlmoHfForCausalLM.from_pretrained(tmp_path).eval()
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (9, 8)
    ids = token_ids(1, 4)
    logging.enable_propagation()
    try:
        out = loaded.generate(ids, max_new_tokens=10, do_sample=False)
    finally:
        logging.disable_propagation()
    assert out[0, 4:].tolist() == [9]
    assert "pad_token_id" not in caplog.text


def test_inputs_embeds_and_logits_to_keep():
    model, ids = tiny_model(), token_ids(2, 11)
    logits = model(ids).logits
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, logits)
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:], atol=1e-6, rtol=0)
    kept = model(ids, logits_to_keep=torch.tensor([1, 4])).logits
    torch.testing.assert_close(kept, logits[:, [1, 4]], atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="exactly one of"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="exactly one of"):
        model()
