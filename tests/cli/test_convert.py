"""`olmo-hf convert` as it is typed."""

import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from olmo_hf.cli.main import main
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.state import RunState, load_run_state, save_run_state
from tests.model.conversion.test_convert import write_variant
from tests.model.test_generation import word_tokenizer
from tests.model.tiny import tiny_model, token_ids


def run(*words: object) -> int:
    return main(["convert", *map(str, words)])


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


def test_dtype_and_shards(tmp_path, capsys):
    model = tiny_model()
    model.save_pretrained(tmp_path / "source")
    assert run(tmp_path / "source", tmp_path / "half", "--to", "huggingface", "--dtype", "bfloat16") == 0
    said = capsys.readouterr().out
    assert "difference| on random ids: 0\n" in said, "what was written is what was wanted"
    moved = float(re.search(r"--dtype bfloat16 moves the logits of the source by up to (\S+)", said)[1])
    assert 0 < moved < 0.1
    assert run(tmp_path / "source", tmp_path / "same", "--to", "huggingface", "--dtype", "float32") == 0
    assert "moves the logits of the source by up to 0\n" in capsys.readouterr().out
    half = OlmoHfForCausalLM.from_pretrained(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())


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
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (0, 1, 32)


def test_tokenizer_comes_along_to_the_original_and_back(tmp_path, capsys):
    tiny_model(eos_token_id=0, pad_token_id=1).save_pretrained(tmp_path / "source")
    word_tokenizer().save_pretrained(tmp_path / "source")
    assert run(tmp_path / "source", tmp_path / "original", "--to", "original") == 0
    assert "tokenizer.identifier" in capsys.readouterr().out
    assert run(tmp_path / "original", tmp_path / "back") == 0
    before, *after = (
        AutoTokenizer.from_pretrained(tmp_path / name).backend_tokenizer.to_str()
        for name in ("source", "original", "back")
    )
    assert after == [before, before]


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


def test_no_checkpoint_at_all(tmp_path, capsys):
    assert run(tmp_path, tmp_path / "out") == 2
    assert "no checkpoint; expected" in capsys.readouterr().err
