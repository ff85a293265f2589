"""What one side can say and the other cannot."""

import pytest

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.architecture import ORIGINAL_DEFAULTS, config_from_original, config_to_original
from tests.model.tiny import tiny_config


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
