"""The rules of the ladder."""

import pytest

from olmo_hf.config_file import run_from_tree
from olmo_hf.errors import ConfigError
from olmo_hf.model.build import build_config
from olmo_hf.recipes.ladder import BASE, SIZES, architecture_of, make_rung

# Parameters without the token embedding, as the original's ladder and the DataDecide models count them.
PUBLISHED = {
    "4M": 3_744_832,
    "20M": 19_101_888,
    "60M": 57_078_144,
    "90M": 97_946_640,
    "150M": 151_898_880,
    "300M": 319_980_544,
    "530M": 530_074_944,
    "750M": 681_297_408,
    "1B": 1_176_832_000,
    "7B": 6_682_316_800,
}


def rung(size: str, multiple: float = 1.0, *, batch_multiple: int = 32):
    vocabulary = build_config(load_run_of_base().model)
    return make_rung(size, multiple, vocabulary=vocabulary, sequence_length=2048, batch_multiple=batch_multiple)


def load_run_of_base():
    training = BASE["training"] | {"global_train_batch_size": 8, "max_duration": 1}
    return run_from_tree(BASE | {"training": training})


@pytest.mark.parametrize("size", PUBLISHED)
def test_sizes_are_the_published_ones(size):
    assert rung(size).parameters == PUBLISHED[size]


def test_what_follows_from_the_size():
    """By hand for 150M: (151,898,880 / 108e6) is 1.40647; 160 x 1.40647^(2/3) = 200.85, nearest multiple of 32: 192;
    0.0047 x 1.40647^(-1/3) = 4.1949e-3."""
    found = rung("150M", 2.0)
    assert found.batch_instances == 192
    assert found.learning_rate == pytest.approx(4.1949e-3, rel=1e-4)
    assert found.warmup_tokens == 151_898_880
    assert found.length_tokens == 2 * 20 * 151_898_880
    assert found.steps == -(-found.length_tokens // (192 * 2048))
    assert found.name == "150M-2xC"


def test_every_named_size_can_be_built():
    for size in SIZES:
        fields = architecture_of(size)
        assert fields["hidden_size"] % fields["num_attention_heads"] == 0
    with pytest.raises(ConfigError):
        architecture_of("")
