"""What is saved comes back bit for bit, by every door."""

import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Olmo2ForCausalLM

from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests.model.tiny import SHAPES, tiny_model, token_ids


def numbered_model(**changes):
    """Parameter i holds the constant 0.01 * (i + 1), which no initialisation would give."""
    model = tiny_model(**changes)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 * (index + 1))
    return model


def assert_same_weights(expected, loaded, dtype=torch.float32):
    theirs = dict(loaded.named_parameters())
    assert theirs.keys() == {name for name, _ in expected.named_parameters()}
    for name, parameter in expected.named_parameters():
        assert theirs[name].dtype == dtype
        assert torch.equal(theirs[name], parameter.to(dtype)), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"low_cpu_mem_usage": True}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}],
    ids=["plain", "low_cpu_mem", "bf16", "device_map"],
)
def test_every_weight_returns(tmp_path, shape, options):
    model = numbered_model(**SHAPES[shape])
    model.save_pretrained(tmp_path)
    for _ in range(2):  # a second load in the same process has met faults of its own
        loaded, info = OlmoHfForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert not any(info.values())
        assert_same_weights(model, loaded, options.get("dtype", torch.float32))


def test_shards(tmp_path):
    model = numbered_model(num_hidden_layers=8, hidden_size=64, intermediate_size=256)
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_weights(model, OlmoHfForCausalLM.from_pretrained(tmp_path))
    assert_same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_auto_class_gives_the_stock_class_or_ours(tmp_path):
    stock, own = numbered_model(), numbered_model(**SHAPES["all_extras"])
    stock.save_pretrained(tmp_path / "stock")
    own.save_pretrained(tmp_path / "own")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert type(loaded) is Olmo2ForCausalLM
    assert_same_weights(stock, loaded)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert type(loaded) is OlmoHfForCausalLM
    assert_same_weights(own, loaded)


def test_own_architecture_loads_from_its_own_code_where_the_package_is_absent(tmp_path):
    model = tiny_model(**SHAPES["all_extras"])
    model.save_pretrained(tmp_path / "model")
    ids = token_ids(2, 40)
    save_file({"ids": ids, "logits": model(ids).logits.detach()}, tmp_path / "recorded.safetensors")
    script = """
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("model", trust_remote_code=True).eval()
recorded = load_file("recorded.safetensors")
assert torch.equal(model(recorded["ids"]).logits, recorded["logits"])
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True).eval()
assert torch.equal(again(recorded["ids"]).logits, recorded["logits"])
assert not any(name.split(".")[0] == "olmo_hf" for name in sys.modules)
print("equal")
"""
    environment = {"HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1", "PATH": ""}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.stdout.strip() == "equal", done.stderr


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_stored", [True, False])
def test_tied_and_untied_heads(tmp_path, tied, head_stored):
    model = tiny_model(tie_word_embeddings=tied)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)  # equal values must not make an untied head tied
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert ("lm_head.weight" in stored.keys()) == (not tied)  # noqa: SIM118 (not a dict)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if head_stored:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    loaded, info = OlmoHfForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(loaded.model.embed_tokens.weight, model.model.embed_tokens.weight)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    if tied or head_stored:
        assert not any(info.values())
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    else:
        assert info["missing_keys"] == {"lm_head.weight"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("extras", [{}, {"lm_head_bias": True, "scale_logits": True}], ids=["olmo2", "bias_and_scale"])
def test_resize_keeps_old_rows_and_the_tie(tmp_path, tied, extras):
    if tied and extras:
        extras = {"scale_logits": True}
    model = tiny_model(tie_word_embeddings=tied, tokenizer_vocab_size=100, **extras)
    old, ids = model.model.embed_tokens.weight.detach().clone(), token_ids(1, 12)
    logits = model(ids).logits.detach()
    model.resize_token_embeddings(138)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.vocab_size == model.model.embed_tokens.num_embeddings == 138
    assert model.config.tokenizer_vocab_size == 138
    assert model.generation_config.suppress_tokens is None
    assert torch.equal(model.model.embed_tokens.weight[:128], old)
    torch.testing.assert_close(model(ids).logits[..., :128], logits, atol=1e-6, rtol=0)
    assert model(torch.tensor([[137]])).logits.shape == (1, 1, 138)
    model.save_pretrained(tmp_path)
    loaded = OlmoHfForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(torch.tensor([[137, 5]])).logits, model(torch.tensor([[137, 5]])).logits)


def test_resize_with_padding_suppresses_the_padding_rows():
    model = tiny_model(tokenizer_vocab_size=100)
    model.resize_token_embeddings(130, pad_to_multiple_of=64)
    assert (model.config.vocab_size, model.config.tokenizer_vocab_size) == (192, 130)
    assert model.generation_config.suppress_tokens == list(range(130, 192))


def test_meta_device_and_dtype_casts_cannot_spoil_the_positions(tmp_path):
    """RoPE frequencies are no buffers: nothing to cast, shard, save or forget."""
    model = tiny_model()
    assert list(model.buffers()) == []
    frequencies = model.model.rotary_emb.frequencies.clone()
    with torch.device("meta"):
        born_on_meta = OlmoHfForCausalLM(model.config)
    assert torch.equal(born_on_meta.model.rotary_emb.frequencies, frequencies)
    rotary = born_on_meta.model.rotary_emb
    assert rotary(torch.arange(4, device="meta")[None], torch.float32)[0].is_meta
    rotary(torch.arange(4)[None], torch.float32)
    assert torch.equal(rotary.frequencies, frequencies)
    assert torch.equal(model.bfloat16().float().model.rotary_emb.frequencies, frequencies)


def test_files_copied_elsewhere_still_load(tmp_path):
    model = tiny_model(**SHAPES["alibi"])
    model.save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b", trust_remote_code=False)
    assert_same_weights(model, loaded)
