"""Conversion as a whole: every architecture, both ways, and everything that must be refused."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from olmo_hf.cli.main import main
from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.architecture import ORIGINAL_DEFAULTS, config_from_original, config_to_original
from olmo_hf.model.conversion.convert import largest_logit_difference, open_checkpoint
from olmo_hf.model.conversion.original import open_original
from olmo_hf.model.conversion.safe_load import decode_tensor_name, encode_tensor_name
from olmo_hf.model.conversion.streamed import streamed_logits
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.state import RunState, load_run_state, save_run_state
from tests.model.test_generation import word_tokenizer
from tests.model.tiny import SHAPES, tiny_config, tiny_model, token_ids
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


@pytest.mark.parametrize("tied", [True, False])
def test_padding_rows_are_kept_or_cut(tmp_path, tied):
    model = tiny_model(tokenizer_vocab_size=100, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "source")
    assert run(tmp_path / "source", tmp_path / "kept", "--to", "huggingface") == 0
    assert run(tmp_path / "source", tmp_path / "cut", "--to", "huggingface", "--vocab-padding", "trim") == 0
    kept, cut = (OlmoHfForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("kept", "cut"))
    ids = token_ids(1, 20, vocab_size=100)
    assert (kept.config.vocab_size, cut.config.vocab_size) == (128, 100)
    assert torch.equal(kept(ids).logits, model(ids).logits)
    torch.testing.assert_close(cut(ids).logits, model(ids).logits[..., :100], atol=1e-6, rtol=0)
    assert cut.generation_config.suppress_tokens is None


def test_dtype_and_shards(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "source")
    assert run(tmp_path / "source", tmp_path / "half", "--to", "huggingface", "--dtype", "bfloat16") == 0
    half = OlmoHfForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())


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


def test_tokenizer_comes_along_and_disagreement_is_said(tmp_path, capsys):
    write_variant("olmo2_small", tmp_path / "original")
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    raw = tmp_path / "tokenizer" / "tokenizer.json"
    assert run(tmp_path / "original", tmp_path / "a", "--tokenizer", tmp_path / "tokenizer") == 0
    assert "eos_token_id is 119 in the configuration and 0 in the tokenizer" in capsys.readouterr().out
    assert (tmp_path / "a" / "tokenizer.json").is_file()
    config = (tmp_path / "original" / "config.yaml").read_text().replace("eos_token_id: 119", "eos_token_id: 0")
    config = config.replace("pad_token_id: 118", "pad_token_id: 1") + f"tokenizer:\n  identifier: {raw}\n"
    (tmp_path / "original" / "config.yaml").write_text(config)
    assert run(tmp_path / "original", tmp_path / "b") == 0
    assert "token" not in capsys.readouterr().out.replace(str(tmp_path), "").replace("tensors", "")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (0, 1, 32)


def test_sharded_run_becomes_a_model_that_can_go_on(tmp_path):
    model = tiny_model(num_key_value_heads=2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(token_ids(2, 8), labels=token_ids(2, 8)).loss.backward()
    optimizer.step()
    names = {id(p): name for name, p in model.named_parameters()}
    table = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        table |= {f"optimizer.{names[id(parameter)]}.{key}": value for key, value in values.items()}
    source = tmp_path / "checkpoint-7"
    dcp.save(table, checkpoint_id=source / "sharded", no_dist=True)
    save_run_state(RunState(step=7, tokens=112, identity={"model": model.config.to_diff_dict()}), source)
    assert run(source, tmp_path / "out") == 0
    loaded = OlmoHfForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = token_ids(2, 30)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert load_run_state(tmp_path / "out").step == 7
    stored = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert stored.keys() == {name for name in table if name.startswith("optimizer.")}
    assert all(torch.equal(stored[name], table[name]) for name in stored)


def test_nothing_is_overwritten_and_nothing_half_written_stays(tmp_path, capsys):
    source = tmp_path / "source"
    tiny_model(eos_token_id=0, pad_token_id=1).save_pretrained(source)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    (tmp_path / "there").mkdir()
    assert run(source, tmp_path / "there") == 2
    assert "exists; nothing is overwritten" in capsys.readouterr().err
    tensors = load_file(source / "model.safetensors")
    tensors.pop("model.norm.weight")
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    save_file(tensors, broken / "model.safetensors")
    assert run(broken, tmp_path / "target") == 2
    assert "model.norm.weight" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "source", "there"]
    assert before == {path.name: path.read_bytes() for path in source.iterdir()}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "gelu"}, "hidden_act gelu with mlp_gated True"),
        ({"mlp_bias": True}, "attention_bias, mlp_bias and lm_head_bias"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"eos_token_id": [1, 2]}, "eos_token_id"),
        ({"reset_document_positions": True}, "reset_document_positions"),
    ],
)
def test_what_the_original_cannot_say_is_refused_by_name(changes, word):
    with pytest.raises(ConversionError) as caught:
        config_to_original(tiny_config(**{"eos_token_id": 0, "pad_token_id": 1} | changes))
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"alibi": True, "rope": True}, "alibi and rope"),
        ({"n_kv_heads": 2, "multi_query_attention": True}, "contradicts multi_query_attention"),
        ({"n_kv_heads": 4, "block_type": "llama"}, "llama block"),
        ({"activation_type": "tanh"}, "activation_type"),
        ({"layer_norm_type": "batch"}, "layer_norm_type"),
        ({"d_modle": 3}, "unknown fields d_modle"),
    ],
)
def test_what_the_original_would_refuse_is_refused(changes, word):
    with pytest.raises(ConversionError) as caught:
        config_from_original(ORIGINAL_DEFAULTS | changes)
    assert word in str(caught.value)


def test_defaults_of_the_original_for_fields_left_out():
    config, _ = config_from_original({})
    assert (config.hidden_size, config.vocab_size, config.tokenizer_vocab_size) == (768, 50_304, 50_257)
    assert (config.attention_dropout, config.residual_dropout, config.embedding_dropout) == (0.1, 0.1, 0.1)
    assert (config.position_embedding, config.attention_bias, config.tie_word_embeddings) == ("learned", True, True)


class Poison:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["model.pt", "optim.pt", "train.pt", "rank0.pt", ".metadata", "model.safetensors"])
def test_code_in_a_checkpoint_is_never_run(tmp_path, where):
    """Every format of the original that is a pickle, poisoned."""
    trap, source = tmp_path / "trap", tmp_path / "source"
    good = {"rank0.pt": "sharded_torch_legacy_ws2", ".metadata": "sharded_olmo_core_ws2"}.get(
        where, "step30-unsharded"
    )
    shutil.copytree(CHECKPOINTS / good, source)
    if where == ".metadata":
        (source / where).write_bytes(pickle.dumps(Poison(trap)))
    elif where == "model.safetensors":
        import base64

        key = base64.urlsafe_b64encode(pickle.dumps(((Poison(trap),), False))).decode()
        save_file({key: torch.zeros(2)}, source / where)
    else:
        torch.save({"a": Poison(trap)}, source / where)
    with pytest.raises(ConversionError, match="cannot be read safely"):
        open_checkpoint(source)
    assert not trap.exists()
    Poison(trap).__reduce__()[0](trap)
    assert trap.exists(), "the trap works: the test can fail"


@pytest.mark.parametrize("kind", ["torch_legacy", "local", "torch_new", "olmo_core"])
def test_a_missing_rank_is_named(tmp_path, kind):
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINTS / f"sharded_{kind}_ws2", source)
    victim = {"torch_legacy": "rank1.pt", "local": "model/rank1.pt", "torch_new": "model_and_optim/__1_0.distcp"}
    (source / victim.get(kind, "__1_0.distcp")).unlink()
    with pytest.raises(ConversionError, match=r"missing|do not add up"):
        open_checkpoint(source)


def test_names_of_encoded_safetensors():
    assert encode_tensor_name(("transformer.wte.weight",)) == (
        "gASVHwAAAAAAAACMFnRyYW5zZm9ybWVyLnd0ZS53ZWlnaHSUhZSJhpQu"
    ), "as the original writes it"
    assert decode_tensor_name(encode_tensor_name(("state", "x.weight", "exp_avg"))) == (
        ("state", "x.weight", "exp_avg"),
        False,
    )


@pytest.mark.parametrize("content", ["", "model: 3", "a: [", "modle: {}"])
def test_broken_configuration(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"config.yaml"):
        open_checkpoint(tmp_path)


def test_numbers_in_a_handwritten_configuration(tmp_path):
    """Plain YAML readers take `1e-6` for a word."""
    write_variant("olmo2_small", tmp_path / "original")
    text = (tmp_path / "original" / "config.yaml").read_text()
    assert "layer_norm_eps: 1.0e-06" in text
    (tmp_path / "original" / "config.yaml").write_text(text.replace("1.0e-06", "1e-6"))
    assert open_checkpoint(tmp_path / "original").config.rms_norm_eps == 1e-6


def test_no_checkpoint_at_all(tmp_path, capsys):
    assert run(tmp_path, tmp_path / "out") == 2
    assert "no checkpoint; expected" in capsys.readouterr().err
