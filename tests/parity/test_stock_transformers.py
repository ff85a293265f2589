"""Against transformers' own OLMo classes with the same weights: logits, loss, gradients and generated tokens.

The arithmetic is the same operation by operation, so the difference asked for is zero.
"""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Olmo2Config, Olmo2ForCausalLM, OlmoForCausalLM, PreTrainedConfig

from olmo_hf.model.conversion.architecture import config_from_original
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests.model.tiny import SHAPES, tiny_model, token_ids
from tests.parity.original import GOLDEN, load_variant

STOCK_CLASSES = {"olmo2": Olmo2ForCausalLM, "olmo": OlmoForCausalLM}
STOCK_SHAPES = [name for name in SHAPES if name.startswith("olmo")]


def stock_twin(model: OlmoHfForCausalLM, directory, attn_implementation="sdpa"):
    model.save_pretrained(directory)
    stock_class = STOCK_CLASSES[model.config.stock_model_type]
    twin, info = stock_class.from_pretrained(
        directory, output_loading_info=True, attn_implementation=attn_implementation
    )
    assert not any(info.values())
    return twin.eval()


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", STOCK_SHAPES)
def test_forward_and_backward_are_identical(tmp_path, shape, attn_implementation):
    model = tiny_model(**SHAPES[shape])
    model.set_attn_implementation(attn_implementation)
    twin = stock_twin(model, tmp_path, attn_implementation)
    ids = token_ids(2, 48)
    # Stock zeroes the gradient of the padding row; no pad id is set here, so there is none.
    assert twin.config.pad_token_id is None
    ours, theirs = model(ids, labels=ids, output_hidden_states=True), twin(ids, labels=ids, output_hidden_states=True)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.loss, theirs.loss)
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert torch.equal(mine, other)
    ours.loss.backward()
    theirs.loss.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        # Same operations forward; autograd may add the same terms in another order.
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-6, rtol=1e-5)


def test_attention_weights_are_identical(tmp_path):
    model = tiny_model(num_key_value_heads=2)
    model.set_attn_implementation("eager")
    twin = stock_twin(model, tmp_path, "eager")
    ids = token_ids(2, 16)
    ours, theirs = model(ids, output_attentions=True).attentions, twin(ids, output_attentions=True).attentions
    assert len(ours) == 2
    assert ours[0].shape == (2, 4, 16, 16)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", STOCK_SHAPES)
def test_bf16_logits_are_identical(tmp_path, shape):
    model = tiny_model(**SHAPES[shape])
    model.save_pretrained(tmp_path)
    # `.bfloat16()` on the stock class would also round the frequencies of RoPE, which are a buffer there.
    twin = STOCK_CLASSES[model.config.stock_model_type].from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    ids = token_ids(4, 64)
    expected = twin(ids).logits
    assert torch.equal(model.bfloat16()(ids).logits, expected)
    assert torch.equal(OlmoHfForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()(ids).logits, expected)


def test_norm_weight_acts_before_the_cast():
    norm = tiny_model().model.norm.bfloat16()
    with torch.no_grad():
        norm.weight.fill_(3.0)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = x.float()
    expected = (3.0 * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps))).bfloat16()
    assert torch.equal(norm(x), expected)


def test_long_prompts_in_a_process_without_this_package(tmp_path):
    """The error of a lost rope theta grows with the position, so look far into the row."""
    ids = token_ids(1, 201)
    for shape in STOCK_SHAPES:
        model = tiny_model(**SHAPES[shape] | {"max_position_embeddings": 256})
        model.save_pretrained(tmp_path / shape)
        save_file({"ids": ids, "logits": model(ids).logits.detach()}, tmp_path / f"{shape}.safetensors")
    script = f"""
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
for shape in {STOCK_SHAPES!r}:
    model = AutoModelForCausalLM.from_pretrained(shape).eval()
    recorded = load_file(shape + ".safetensors")
    assert type(model).__module__.startswith("transformers.models.olmo"), type(model)
    logits = model(recorded["ids"]).logits
    assert torch.equal(logits, recorded["logits"]), (shape, (logits - recorded["logits"]).abs().max())
    assert not any(name.split(".")[0] == "olmo_hf" for name in sys.modules)
    print(shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.split() == STOCK_SHAPES, done.stderr


def test_stock_checkpoint_loads_here(tmp_path):
    """A directory that transformers itself wrote, its config.json knowing nothing of us."""
    source = tiny_model(num_key_value_heads=2)
    twin = stock_twin(source, tmp_path / "ours")
    for key in ("rope_theta", "tokenizer_vocab_size"):
        twin.config.__dict__.pop(key, None)
    twin.save_pretrained(tmp_path / "theirs")
    assert "rope_theta" not in json.loads((tmp_path / "theirs" / "config.json").read_text())
    model, info = OlmoHfForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(info.values())
    ids = token_ids(2, 48)
    assert torch.equal(model.eval()(ids).logits, twin(ids).logits)


def test_recorded_logits_of_the_stock_class():
    """Logits that another release of transformers gave for the original's weights."""
    expected = load_file(GOLDEN / "hf_logits.safetensors")["olmo2.hf_logits"]
    variant = load_variant("olmo2")
    with torch.no_grad():
        logits = variant.model(variant.input_ids).logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", json.loads((GOLDEN / "hf.json").read_text())["results"])
def test_configuration_equals_that_of_the_original_converter(name):
    expected = json.loads((GOLDEN / "hf.json").read_text())["results"][name]["hf_config"]
    ours = load_variant(name).model.config.to_dict()
    for key in Olmo2Config.__dataclass_fields__.keys() - PreTrainedConfig.__dataclass_fields__.keys():
        if key in expected and key != "initializer_range":  # the converter leaves the default there
            assert ours[key] == expected[key], key


def test_original_config_of_a_stock_shape_is_a_stock_config():
    config, _ = config_from_original(load_variant("olmo2").facts["model_config"])
    assert config.to_dict()["model_type"] == "olmo2"
