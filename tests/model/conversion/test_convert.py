"""Conversion as a whole: every architecture, both ways, and everything that must be refused."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from olmo_hf.cli.main import main
from olmo_hf.model.conversion.convert import largest_logit_difference, open_checkpoint
from olmo_hf.model.conversion.original import open_original
from olmo_hf.model.conversion.streamed import streamed_logits
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests.model.tiny import SHAPES, tiny_model, token_ids
from tests.parity.original import VARIANTS, index, load_variant

CHECKPOINTS = Path(__file__).parents[2] / "golden" / "11_checkpoints"


def run(*words: object) -> int:
    return main(["convert", *map(str, words)])


def write_variant(name: str, directory: Path) -> dict[str, torch.Tensor]:
    """A golden model as a checkpoint of the original, with all the names and settings it came with."""
    from omegaconf import OmegaConf

    from tests.parity.original import GOLDEN

    directory.mkdir()
    OmegaConf.save(OmegaConf.create({"model": index()[name]["model_config"]}), directory / "config.yaml")
    stored = load_file(GOLDEN / index()[name]["weights_in"])
    weights = {k.removeprefix("weights."): v for k, v in stored.items() if k.startswith("weights.")}
    torch.save(weights, directory / "model.pt")
    return weights


@pytest.mark.parametrize("name", [name for name in VARIANTS if "attn" not in name and "attention_bias" not in name])
def test_every_architecture_there_and_back(tmp_path, name):
    weights = write_variant(name, tmp_path / "original")
    assert run(tmp_path / "original", tmp_path / "hf") == 0
    assert run(tmp_path / "hf", tmp_path / "back") == 0
    back = open_original(tmp_path / "back")
    if "llama" in name or "group" in name:  # other names for the same numbers
        total = sum(tensor.double().sum() for tensor in weights.values())
        assert sum(t.read().double().sum() for t in back.weights.values()).item() == pytest.approx(total.item())
    else:
        assert back.weights.keys() == weights.keys()
        assert all(torch.equal(back.weights[key].read(), weights[key]) for key in weights)
    variant = load_variant(name)
    model = OlmoHfForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        logits = model(variant.input_ids, attention_mask=variant.attention_mask).logits
    torch.testing.assert_close(logits, variant.tensors["logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_layer_by_layer_are_those_of_the_model(shape):
    model, ids = tiny_model(**SHAPES[shape]), token_ids(2, 40)
    from olmo_hf.model.conversion.lazy import from_memory

    weights = from_memory(dict(model.named_parameters()))
    torch.testing.assert_close(streamed_logits(model.config, weights, ids), model(ids).logits, atol=1e-6, rtol=0)


def test_verification_notices_a_wrong_target(tmp_path):
    tiny_model().save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    names = ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight")
    tensors |= {names[0]: tensors[names[1]], names[1]: tensors[names[0]]}
    save_file(tensors, tmp_path / "b" / "model.safetensors", metadata={"format": "pt"})
    same, other = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "b")
    assert largest_logit_difference(same, same) == 0.0
    assert largest_logit_difference(same, other) > 0.01


def test_model_files_in_shards_load(tmp_path):
    from olmo_hf.model.conversion.convert import write_huggingface

    model = tiny_model(num_hidden_layers=4)
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "target").mkdir()
    write_huggingface(open_checkpoint(tmp_path / "source"), tmp_path / "target", max_shard_bytes=50_000)
    assert len(list((tmp_path / "target").glob("model-*-of-*.safetensors"))) > 3
    loaded, info = OlmoHfForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not any(info.values())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
