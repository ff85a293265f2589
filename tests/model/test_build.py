import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from olmo_hf.errors import CheckpointError, ConfigError
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import build_config, build_model, choose_attn_implementation, load_tokenizer
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.model.presets import PRESETS
from tests.model.test_generation import word_tokenizer
from tests.model.tiny import SHAPES, TINY, tiny_model, token_ids

OWN = {key: value for key, value in TINY.items() if key != "vocab_size"}


@pytest.fixture
def tokenizer():
    return word_tokenizer()  # 100 ids, eos 0, pad 1


def problems_of(args, **options):
    with pytest.raises(ConfigError) as caught:
        build_config(args, **options)
    return caught.value.problems


def test_preset_config_and_both():
    assert build_config(ModelArgs(preset="olmo2_1b")).hidden_size == 2048
    assert build_config(ModelArgs(config=TINY)).hidden_size == 32
    refined = build_config(ModelArgs(preset="olmo2_tiny", config={"num_hidden_layers": 2, "rope_theta": 1e4}))
    assert (refined.hidden_size, refined.num_hidden_layers) == (192, 2)
    assert refined.rope_parameters["rope_theta"] == 1e4
    assert PRESETS["olmo2_tiny"]["num_hidden_layers"] == 4, "presets are not changed by using them"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, ["set model.preset, model.config or model.init_from"]),
        ({"preset": "olmo2_1b", "init_from": "x"}, ["preset 'olmo2_1b'", "init_from 'x'"]),
        ({"preset": "olmo3"}, ["model.preset: found 'olmo3'", "olmo2_1b"]),
        ({"config": {"hidden_siz": 1}}, ["model.config.hidden_siz", "did you mean hidden_size?"]),
        ({"config": TINY | {"num_hidden_layers": "two"}}, ["num_hidden_layers", "two"]),
        ({"config": TINY | {"num_attention_heads": 5}}, ["hidden_size 32", "num_attention_heads 5"]),
        ({"config": TINY | {"eos_token_id": 10**9}}, ["model.config.eos_token_id: found 1000000000", "0 to"]),
        ({"config": TINY | {"pad_token_id": -1}}, ["model.config.pad_token_id: found -1"]),
        ({"init_from": "/does/not/exist"}, ["model.init_from", "/does/not/exist"]),
    ],
)
def test_bad_sections_are_refused_by_name(args, words):
    text = "\n".join(problems_of(ModelArgs(**args)))
    assert all(word in text for word in words), text


def test_all_unknown_keys_at_once():
    assert len(problems_of(ModelArgs(config={"hidden_siz": 1, "num_layers": 2, "eps": 3}))) == 3


def test_tokenizer_completes_the_architecture(tokenizer):
    config = build_config(ModelArgs(config=OWN), tokenizer=tokenizer)
    assert (config.vocab_size, config.tokenizer_vocab_size) == (128, 100)
    assert (config.eos_token_id, config.pad_token_id) == (0, 1)
    config = build_config(ModelArgs(preset="olmo2_tiny"), tokenizer=tokenizer)
    assert (config.vocab_size, config.tokenizer_vocab_size, config.eos_token_id) == (128, 100, 0)


def test_tokenizer_that_does_not_fit_is_refused(tokenizer):
    (problem,) = problems_of(ModelArgs(config=TINY | {"vocab_size": 64}), tokenizer=tokenizer)
    assert all(word in problem for word in ("model.config.vocab_size: found 64", "100 ids", "at least 128"))
    (problem,) = problems_of(ModelArgs(config=TINY | {"tokenizer_vocab_size": 99}), tokenizer=tokenizer)
    assert all(word in problem for word in ("tokenizer_vocab_size: found 99", "100 ids"))
    problems = problems_of(ModelArgs(config=TINY | {"eos_token_id": 7, "pad_token_id": 8}), tokenizer=tokenizer)
    assert len(problems) == 2
    assert all(word in problems[0] for word in ("eos_token_id: found 7", "'w7'", "0 ('<eos>')", "set model.config"))
    problems = problems_of(ModelArgs(preset="olmo2_1b"), tokenizer=tokenizer)
    assert [problem.split(":")[0] for problem in problems] == [
        "model.config.eos_token_id",
        "model.config.pad_token_id",
    ]


def test_sequence_length_becomes_the_length_that_other_tools_read():
    assert build_config(ModelArgs(preset="olmo2_tiny"), max_position_embeddings=64).max_position_embeddings == 64
    assert build_config(ModelArgs(preset="olmo2_tiny"), max_position_embeddings=999).max_position_embeddings == 999
    longer = ModelArgs(config=TINY)  # says 64
    assert build_config(longer, max_position_embeddings=32).max_position_embeddings == 64
    (problem,) = problems_of(longer, max_position_embeddings=65)
    assert all(word in problem for word in ("max_position_embeddings: found 64", "data.sequence_length is 65"))


def test_harness_sees_the_sequence_length(tmp_path, tokenizer):
    lm_eval = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-eval")
    model = build_model(ModelArgs(config=OWN), seed=0, tokenizer=tokenizer, max_position_embeddings=64)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path / "raw")
    load_tokenizer(ModelArgs(tokenizer=str(tmp_path / "raw")), model_max_length=64).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == 64
    harness = lm_eval.HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32")
    assert harness.max_length == 64


def test_load_tokenizer_from_directory_file_and_checkpoint(tmp_path, tokenizer):
    assert load_tokenizer(ModelArgs(preset="olmo2_tiny")) is None
    tokenizer.save_pretrained(tmp_path)
    for args in (
        ModelArgs(tokenizer=str(tmp_path)),
        ModelArgs(tokenizer=str(tmp_path / "tokenizer.json")),
        ModelArgs(init_from=str(tmp_path)),
    ):
        loaded = load_tokenizer(args, model_max_length=77)
        assert isinstance(loaded, PreTrainedTokenizerFast)
        assert loaded("w5 w6").input_ids == [5, 6]
        assert loaded.model_max_length == 77
    assert load_tokenizer(ModelArgs(init_from=str(tmp_path / "elsewhere"))) is None


@pytest.mark.parametrize("name", ["missing", "broken.json"])
def test_missing_or_broken_tokenizer(tmp_path, name):
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"model.tokenizer: found .*, expected a directory"):
        load_tokenizer(ModelArgs(tokenizer=str(tmp_path / name)))


TRICKY = [
    "def f(x):\n\treturn x**2",
    "1234567890 3.14",
    "><\n\n",
    "🦙 naïve",
    "trailing  ",
    " leading",
    "a\r\nb",
    "\n\n\n",
]


def test_token_ids_survive_saving(tmp_path):
    """A byte-level tokenizer, raw and through every door of transformers, before and after saving."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    # A splitting rule of its own, which a rebuilt tokenizer would lose.
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<eos>"], initial_alphabet=alphabet)
    raw.train_from_iterator(TRICKY * 3, trainer)
    raw.save(str(tmp_path / "tokenizer.json"))
    expected = [raw.encode(text).ids for text in TRICKY]
    first = load_tokenizer(ModelArgs(tokenizer=str(tmp_path / "tokenizer.json")))
    first.save_pretrained(tmp_path / "saved")
    for tokenizer in (first, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert [tokenizer(text).input_ids for text in TRICKY] == expected
        assert [tokenizer.decode(ids) for ids in expected] == TRICKY


def test_attention_backend():
    config = build_config(ModelArgs(config=TINY))
    assert choose_attn_implementation("eager", config) == "eager"
    assert choose_attn_implementation("auto", config) in ("sdpa", "flash_attention_2")
    assert (
        build_model(ModelArgs(config=TINY, attn_implementation="eager"), seed=0).config._attn_implementation == "eager"
    )


def test_auto_needs_half_precision_for_flash_attention(monkeypatch):
    """What is decided on a machine with a GPU and the package, without having them."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("olmo_hf.model.build.is_flash_attn_2_available", lambda: True)
    config, alibi = build_config(ModelArgs(config=TINY)), build_config(ModelArgs(config=TINY | SHAPES["alibi"]))
    assert choose_attn_implementation("auto", config, half_precision=True) == "flash_attention_2"
    assert choose_attn_implementation("auto", config, half_precision=False) == "sdpa"
    assert choose_attn_implementation("auto", alibi, half_precision=True) == "sdpa"


def test_backends_that_cannot_train_the_model_here():
    with pytest.raises(ConfigError, match="ALiBi; choose sdpa"):
        build_model(ModelArgs(config=TINY | SHAPES["alibi"], attn_implementation="flash_attention_2"), seed=0)
    if not torch.accelerator.is_available():
        with pytest.raises(ConfigError, match="no backward pass on CPUs"):
            build_model(ModelArgs(config=TINY, attn_implementation="flex_attention"), seed=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash attention may be installed on a GPU machine")
def test_backend_that_is_not_there_is_refused_not_replaced():
    with pytest.raises(ConfigError, match=r"model.attn_implementation: found 'flash_attention_2'"):
        build_model(ModelArgs(config=TINY, attn_implementation="flash_attention_2"), seed=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_init_from_continues_with_the_same_model(tmp_path, shape):
    source = tiny_model(**SHAPES[shape]).bfloat16()
    source.save_pretrained(tmp_path)
    model = build_model(ModelArgs(init_from=str(tmp_path)), seed=0).eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "master weights are fp32 whatever the file holds"
    ids = token_ids(2, 32)
    assert torch.equal(model(ids).logits, source.float()(ids).logits)


def test_init_from_with_changes(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    args = ModelArgs(init_from=str(tmp_path), config={"residual_dropout": 0.1})
    assert build_model(args, seed=0, max_position_embeddings=32).config.max_position_embeddings == 64
    model = build_model(args, seed=0, max_position_embeddings=128)
    assert model.config.residual_dropout == 0.1
    assert model.config.max_position_embeddings == 128


def test_learned_positions_cannot_be_stretched(tmp_path):
    tiny_model(**SHAPES["learned"]).save_pretrained(tmp_path)
    (problem,) = problems_of(ModelArgs(init_from=str(tmp_path)), max_position_embeddings=128)
    assert all(word in problem for word in ("sequence_length: found 128", "64 tokens"))


@pytest.mark.parametrize("fault", ["missing", "unexpected", "mismatched"])
def test_wrong_weights_are_an_error_not_a_warning(tmp_path, fault):
    tiny_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        tensors.pop(name)
    elif fault == "unexpected":
        tensors[name := "model.layers.7.mlp.up_proj.weight"] = torch.zeros(1)
    else:
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        build_model(ModelArgs(init_from=str(tmp_path)), seed=0)


def test_damaged_weights(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be read"):
        build_model(ModelArgs(init_from=str(tmp_path)), seed=0)
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        build_model(ModelArgs(init_from=str(tmp_path)), seed=0)


def test_weights_that_are_no_numbers(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
        model.lm_head.weight[0, 0] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"2 weights .*model\.norm\.weight.*lm_head\.weight"):
        build_model(ModelArgs(init_from=str(tmp_path)), seed=0)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"x": "../../x"}}'])
def test_index_files_that_are_none(tmp_path, content):
    tiny_model(num_hidden_layers=8, hidden_size=64, intermediate_size=256).save_pretrained(
        tmp_path, max_shard_size="1MB"
    )
    assert (tmp_path / "model.safetensors.index.json").is_file()
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.init_from: the weights in .* cannot be read"):
        build_model(ModelArgs(init_from=str(tmp_path)), seed=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": "128"}, "vocab_size"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_theta must be a number"),
        ({"hidden_act": 3}, "hidden_act"),
    ],
)
def test_starting_points_with_an_impossible_configuration(tmp_path, changes, words):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (problem,) = problems_of(ModelArgs(init_from=str(tmp_path)))
    assert "model.init_from" in problem
    assert words in problem


def test_stock_checkpoint_has_the_same_loss(tmp_path):
    from transformers import Olmo2Config, Olmo2ForCausalLM

    torch.manual_seed(0)
    stock = Olmo2ForCausalLM(Olmo2Config(**TINY, pad_token_id=1, eos_token_id=0)).eval()
    stock.save_pretrained(tmp_path)
    model = build_model(ModelArgs(init_from=str(tmp_path)), seed=0).eval()
    assert isinstance(model, OlmoHfForCausalLM)
    ids = token_ids(2, 32)
    assert torch.equal(model(ids, labels=ids).loss, stock(ids, labels=ids).loss)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "no config.json"),  # transformers alone would build the default of 7B parameters
        ("config.json", "{}", "without a model_type"),
        ("config.json", "{", "not a valid JSON file"),
        ("config.json", '{"model_type": "llama"}', "model_type llama"),
        ("model.safetensors", None, "model.safetensors"),
    ],
)
def test_starting_points_with_a_missing_or_foreign_file(tmp_path, file, content, words):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises((ConfigError, CheckpointError), match=r"model\.init_from") as caught:
        build_model(ModelArgs(init_from=str(tmp_path)), seed=0)
    assert words in str(caught.value)
