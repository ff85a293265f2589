import json

import pytest
from transformers import AutoConfig, Olmo2Config, OlmoConfig

import olmo_hf
from olmo_hf.model.configuration_olmo import CODE_FILES, OlmoHfConfig
from olmo_hf.model.presets import PRESETS
from tests.model.tiny import OLMO1, SHAPES, TINY, tiny_config

EXPECTED_TYPES = {
    "olmo2": "olmo2",
    "olmo2_gqa": "olmo2",
    "olmo2_tied": "olmo2",
    "olmo2_attention_bias": "olmo2",
    "olmo1": "olmo",
    "olmo1_clip": "olmo",
    "alibi": "olmo_hf",
    "learned": "olmo_hf",
    "all_extras": "olmo_hf",
}


def saved(config, directory):
    config.save_pretrained(directory)
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_and_read_back(tmp_path, shape):
    config = tiny_config(**SHAPES[shape])
    written = saved(config, tmp_path)
    assert written["model_type"] == EXPECTED_TYPES[shape]
    assert ("auto_map" in written) == (EXPECTED_TYPES[shape] == "olmo_hf")
    assert all((tmp_path / name).is_file() == (EXPECTED_TYPES[shape] == "olmo_hf") for name in CODE_FILES)
    assert OlmoHfConfig.from_pretrained(tmp_path).to_init_dict() == config.to_init_dict()
    assert OlmoHfConfig.from_dict(config.to_dict()).to_init_dict() == config.to_init_dict()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_config_json(tmp_path, name):
    config = OlmoHfConfig(**PRESETS[name])
    saved(config, tmp_path)
    assert OlmoHfConfig.from_pretrained(tmp_path).to_init_dict() == config.to_init_dict()


@pytest.mark.parametrize(
    "changes", [{"init_method": "mitchell"}, {"tokenizer_vocab_size": 100}, {"init_cutoff_factor": 3}]
)
def test_settings_unknown_to_stock_are_kept_beside_the_stock_ones(tmp_path, changes):
    written = saved(tiny_config(**changes), tmp_path)
    assert written["model_type"] == "olmo2"
    assert written.items() >= changes.items()
    assert OlmoHfConfig.from_pretrained(tmp_path).to_init_dict().items() >= changes.items()


def test_rope_theta_is_written_for_old_readers(tmp_path):
    written = saved(tiny_config(rope_theta=123_000.0), tmp_path)
    assert written["rope_theta"] == 123_000.0
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 123_000.0}
    assert tiny_config().to_dict()["rope_theta"] == 500_000.0


@pytest.mark.parametrize(("stock_class", "shape"), [(Olmo2Config, {}), (OlmoConfig, OLMO1)])
def test_stock_defaults_hold_for_what_a_stock_file_leaves_out(tmp_path, stock_class, shape):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": stock_class.model_type, "hidden_size": 64}))
    ours, stock = OlmoHfConfig.from_pretrained(tmp_path), stock_class.from_pretrained(tmp_path)
    assert ours.stock_model_type == stock_class.model_type
    for name in ("vocab_size", "num_hidden_layers", "max_position_embeddings", "eos_token_id", "rope_parameters"):
        assert getattr(ours, name) == getattr(stock, name), name
    expected_eps = 1e-5  # olmo2's default; hard-wired in stock olmo
    assert ours.rms_norm_eps == expected_eps


@pytest.mark.parametrize(
    "change",
    [
        {"norm_position": "pre"},
        {"norm_type": "layer"},
        {"norm_affine": False},
        {"norm_bias": True},
        {"qk_norm": False},
        {"qk_norm_affine": False},
        {"clip_qkv": 8.0},
        {"mlp_gated": False},
        {"position_embedding": "alibi"},
        {"rope_full_precision": False},
        {"embedding_norm": True},
        {"mlp_bias": True},
        {"lm_head_bias": True},
        {"residual_dropout": 0.1},
        {"embedding_dropout": 0.1},
        {"scale_logits": True},
    ],
)
def test_one_change_is_enough_to_leave_the_stock_architecture(change):
    assert tiny_config(**change).stock_model_type is None


def test_low_precision_norm_is_stock_olmo_and_not_forgotten(tmp_path):
    written = saved(tiny_config(**OLMO1 | {"norm_type": "low_precision_layer"}), tmp_path)
    assert written["model_type"] == "olmo"
    assert OlmoHfConfig.from_pretrained(tmp_path).norm_type == "low_precision_layer"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 5}, ["hidden_size 32", "num_attention_heads 5"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads 3"]),
        ({"tokenizer_vocab_size": 129}, ["tokenizer_vocab_size", "vocab_size 128", "129"]),
        ({"tokenizer_vocab_size": 0}, ["tokenizer_vocab_size", "0"]),
        ({"hidden_size": 0, "vocab_size": -1}, ["vocab_size must be at least 1, found -1", "hidden_size"]),
        ({"num_attention_heads": 0, "head_dim": 8}, ["head_dim 8"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers must lie between 0 and 1,000, found 1000000000000"]),
        ({"num_attention_heads": 0}, ["num_attention_heads must be at least 1"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads 0"]),
        ({"intermediate_size": 0, "max_position_embeddings": 0}, ["intermediate_size", "max_position_embeddings"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps"]),
        ({"attention_dropout": 1.5}, ["attention_dropout"]),
        ({"init_cutoff_factor": 0.0}, ["init_cutoff_factor"]),
        ({"initializer_range": -0.1}, ["initializer_range"]),
        ({"clip_qkv": float("nan")}, ["clip_qkv"]),
        ({"hidden_act": "sliu"}, ["hidden_act sliu"]),
        ({"rope_theta": 0.0}, ["rope_theta"]),
        ({"rope_theta": float("inf")}, ["rope_theta must be a number"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, ["rope_type", "spiral"]),
        ({"clip_qkv": 0.0}, ["clip_qkv"]),
        ({"tie_word_embeddings": True, "lm_head_bias": True}, ["lm_head_bias"]),
        ({"num_attention_heads": 32}, ["even head size"]),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, ["dynamic"]),
        ({"num_attention_heads": 5, "clip_qkv": -1.0}, ["num_attention_heads 5", "clip_qkv"]),
        ({"norm_type": "batch"}, ["norm_type"]),
        ({"hidden_size": "32"}, ["hidden_size"]),
        ({"head_dim": 16}, ["head_dim"]),
    ],
)
def test_impossible_settings_are_refused_by_name(changes, words):
    with pytest.raises(Exception, match="(?s)" + ".*".join(words)):
        OlmoHfConfig(**(TINY | changes))


def test_auto_config_knows_the_type_and_leaves_olmo2_alone(tmp_path):
    assert olmo_hf.OlmoHfConfig is OlmoHfConfig
    tiny_config(**SHAPES["alibi"]).save_pretrained(tmp_path / "own")
    tiny_config().save_pretrained(tmp_path / "stock")
    assert type(AutoConfig.from_pretrained(tmp_path / "own")) is OlmoHfConfig
    assert type(AutoConfig.from_pretrained(tmp_path / "stock")) is Olmo2Config


def test_configurations_of_other_models_are_refused(tmp_path):
    """Their tensors may have the same names and mean something else."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 32}))
    with pytest.raises(ValueError, match="model_type llama is no OLMo architecture"):
        OlmoHfConfig.from_pretrained(tmp_path)
