"""Checkpoints that are damaged or contradict themselves: one line names the fault, and nothing is written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from olmo_hf.cli.main import main
from tests.model.tiny import tiny_model

CHECKPOINTS = Path(__file__).parents[2] / "golden" / "11_checkpoints"


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def refusal(source: Path, capsys, *options: str) -> str:
    """What `olmo-hf convert` says on stderr; it must leave nothing behind."""
    capsys.readouterr()
    before = {path.name for path in source.parent.iterdir()}
    assert main(["convert", str(source), str(source.parent / "target"), *options]) == 2
    assert {path.name for path in source.parent.iterdir()} == before
    return capsys.readouterr().err


@pytest.fixture
def ours(tmp_path):
    source = tmp_path / "ours"
    tiny_model(eos_token_id=0, pad_token_id=1).save_pretrained(source)
    return source


def change_config(source: Path, **changes) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | changes))


def change_weights(source: Path, change) -> None:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("sharded_torch_new_ws2", "model_and_optim/__0_0.distcp"),
        ("sharded_olmo_core_ws2", "__1_0.distcp"),
        ("sharded_torch_legacy_ws2", "rank1.pt"),
        ("sharded_local_ws2", "model/rank0.pt"),
        ("step30-unsharded", "model.pt"),
        ("step30-unsharded", "optim.pt"),
        ("step30-unsharded", "train.pt"),
    ],
)
def test_files_of_the_original_cut_in_half(tmp_path, capsys, kind, file):
    shutil.copytree(CHECKPOINTS / kind, tmp_path / "source")
    cut(tmp_path / "source" / file)
    assert Path(file).name in refusal(tmp_path / "source", capsys)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("model.pt", [1, 2], "model.pt: holds a list"),
        ("model.pt", {"transformer": {"wte": 1}}, "model.pt: transformer is a dict"),
        ("optim.pt", {"x": 1}, "not what its files promise"),
        ("train.pt", [1], "not what its files promise"),
    ],
)
def test_files_of_the_original_that_hold_something_else(tmp_path, capsys, file, content, words):
    shutil.copytree(CHECKPOINTS / "step30-unsharded", tmp_path / "source")
    torch.save(content, tmp_path / "source" / file)
    assert words in refusal(tmp_path / "source", capsys)


@pytest.mark.parametrize("to", ["huggingface", "original"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "q_proj|25 weights"),
        ({"num_hidden_layers": 1}, "model.layers.1."),
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"num_key_value_heads": 2}, "k_proj"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"intermediate_size": 128}, "proj"),
        ({"model_type": "llama"}, "model_type llama"),
        ({"tie_word_embeddings": True, "vocab_size": 64}, "embed_tokens"),
    ],
)
def test_a_configuration_that_is_not_that_of_the_weights(ours, capsys, changes, words, to):
    change_config(ours, **changes)
    said = refusal(ours, capsys, "--to", to)
    assert any(word in said for word in words.split("|")), said


def test_a_configuration_that_is_no_json(ours, capsys):
    (ours / "config.json").write_text("{")
    assert "config.json" in refusal(ours, capsys)


def test_weights_cut_short(ours, capsys):
    content = (ours / "model.safetensors").read_bytes()
    (ours / "model.safetensors").write_bytes(content[:-100])
    assert "model.safetensors: is no readable safetensors file" in refusal(ours, capsys)


def test_a_shard_that_is_missing(tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path / "source", max_shard_size="20KB")
    shards = sorted((tmp_path / "source").glob("model-*.safetensors"))
    shards[1].unlink()
    assert shards[1].name in refusal(tmp_path / "source", capsys)


def test_an_index_that_leads_elsewhere(tmp_path, capsys):
    tiny_model().save_pretrained(tmp_path / "source", max_shard_size="20KB")
    index = tmp_path / "source" / "model.safetensors.index.json"
    shard = sorted((tmp_path / "source").glob("model-*.safetensors"))[0]
    shutil.move(shard, tmp_path / shard.name)
    index.write_text(index.read_text().replace(shard.name, f"../{shard.name}"))
    assert f"../{shard.name}" in refusal(tmp_path / "source", capsys)


def test_a_stray_weight_file_is_not_read(ours, tmp_path):
    save_file({"model.norm.weight": torch.zeros(32)}, ours / "model_of_yesterday.safetensors")
    assert main(["convert", str(ours), str(tmp_path / "out"), "--to", "huggingface"]) == 0
    found, expected = (load_file(where / "model.safetensors") for where in (tmp_path / "out", ours))
    assert torch.equal(found["model.norm.weight"], expected["model.norm.weight"])


def test_weights_that_are_no_numbers(ours, tmp_path, capsys):
    change_weights(ours, lambda tensors: tensors["model.norm.weight"][0].fill_(float("nan")))
    assert "the logits of the source itself are not numbers" in refusal(ours, capsys)
    assert main(["convert", str(ours), str(tmp_path / "out"), "--no-verify"]) == 0
    assert torch.load(tmp_path / "out" / "model.pt", weights_only=True)["transformer.ln_f.weight"][0].isnan()


def test_weights_too_large_for_the_type(ours, capsys):
    change_weights(ours, lambda tensors: tensors["lm_head.weight"][0].fill_(1e30))
    said = refusal(ours, capsys, "--to", "huggingface", "--dtype", "float16")
    assert "too large for the type asked for" in said


@pytest.mark.parametrize("file", ["optimizer.json", "run_state.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["{", "[]", "{}", "[" * 100_000], ids=["cut", "a list", "empty", "deep"])
def test_descriptions_edited_by_hand_are_named(ours: Path, capsys, file: str, text: str) -> None:
    if "index" in file:
        (ours / "model.safetensors").rename(ours / "model-00001-of-00001.safetensors")
    (ours / file).write_text(text)
    assert f"{ours / file}: does not say its" in refusal(ours, capsys)
