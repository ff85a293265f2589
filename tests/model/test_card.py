import pytest
from huggingface_hub import ModelCard

from olmo_hf.model.card import MOST_PATHS, CardFacts, public_path, write_card
from olmo_hf.model.size import count_parameters
from tests.model.tiny import SHAPES, tiny_config

SETTINGS = {
    "model": {"init_from": "someone/older-model"},
    "data": {
        "paths": ["data/a.npy", "https://me:pass@example.org/b.npy?signature=abc", *(f"c{n}.npy" for n in range(30))],
        "seed": 7,
    },
    "training": {
        "learning_rate": 4e-4,
        "z_loss_weight": 1e-5,
        "scheduler": {"name": "cosine_with_warmup", "warmup": 2000, "t_max": None},
        "output_dir": "/secret/place",
    },
}


def test_everything_a_reader_asks_is_there():
    facts = CardFacts(
        name="someone/model",
        config=tiny_config(),
        step=30,
        tokens=7680,
        settings=SETTINGS,
        metrics={"eval/held-out/CrossEntropyLoss": 2.5, "train/CrossEntropyLoss": 2.25},
        versions={"torch": "2.13.0"},
    )
    card = write_card(facts)
    for words in (
        f"| parameters | {count_parameters(tiny_config()).total:,} (",
        "- `data/a.npy`",
        f"- and {len(SETTINGS['data']['paths']) - MOST_PATHS} more files",
        "| learning_rate | 0.0004 |",
        "| scheduler.warmup | 2000 |",
        "| eval/held-out/CrossEntropyLoss | 2.5 |",
        "| started from | someone/older-model |",
        "| tokens seen | 7,680 |",
        "| torch | 2.13.0 |",
    ):
        assert words in card, words
    for words in ("pass@", "signature", "/secret/place", "trust_remote_code", "t_max"):
        assert words not in card, words
    parsed = ModelCard(card)
    assert parsed.data.base_model == "someone/older-model"
    assert parsed.data.library_name == "transformers"


@pytest.mark.parametrize(
    ("training", "row"),
    [
        ({"resume": "auto"}, "| started from | someone/older-model |"),
        ({"resume": "runs/stage1"}, "| started from | runs/stage1 |"),
        (
            {"resume": "s3://me:pass@bucket/stage1?key=1", "reset_trainer_state": True, "reset_optimizer": False},
            "| started from | s3://bucket/stage1; steps and tokens counted from zero |",
        ),
    ],
)
def test_a_second_stage_names_the_run_it_came_from(training, row):
    settings = SETTINGS | {"training": training}
    assert row in write_card(CardFacts(name="someone/model", config=tiny_config(), settings=settings))


def test_a_bare_checkpoint_of_an_own_architecture():
    card = write_card(CardFacts(name="someone/model", config=tiny_config(**SHAPES["alibi"])))
    assert "trust_remote_code=True" in card
    assert card.count("Not recorded.") == 2
    assert "None were recorded." in card
    assert "| started from | not recorded |" in card, "it may have been converted from anything"
    assert ModelCard(card).data.base_model is None


def test_local_starting_points_are_no_base_model():
    card = write_card(CardFacts(name="n", config=tiny_config(), settings={"model": {"init_from": "/a/b/c"}}))
    assert ModelCard(card).data.base_model is None


def test_addresses_lose_their_secrets():
    assert public_path("s3://key:secret@bucket/a.npy?X-Amz-Signature=1") == "s3://bucket/a.npy"
    assert public_path("data/a@b.npy") == "data/a@b.npy"


def test_sources_of_a_mix_and_the_license():
    sources = {
        "web": {"paths": ["s3://key:secret@bucket/web.npy"], "weight": 0.75},
        "code": {"paths": ["code.npy"], "repeat": 2, "weight": None},
    }
    settings = {"data": {"paths": [], "sources": sources, "instance_filter": {"repetition_max_count": 32}}}
    card = write_card(CardFacts(name="n", config=tiny_config(), settings=settings, license="apache-2.0"))
    for words in (
        "- source `web`, weight 0.75\n  - `s3://bucket/web.npy`",
        "- source `code`, repeat 2\n  - `code.npy`",
    ):
        assert words in card
    assert "| repetition_max_count | 32 |" in card
    assert "secret" not in card
    assert ModelCard(card).data.license == "apache-2.0"
    assert card.endswith("## License\n\napache-2.0\n")


def test_where_a_run_started():
    for model, words in (({"preset": "olmo2_1b"}, "random weights"), ({"init_from": "a/b"}, "a/b")):
        card = write_card(CardFacts(name="n", config=tiny_config(), settings={"model": model}))
        assert f"| started from | {words} |" in card


def test_settings_of_another_program():
    for data in (3, [], {"paths": 3, "sources": {"a": None}}, {"paths": "x.npy"}):
        card = write_card(CardFacts(name="n", config=tiny_config(), settings={"data": data, "training": None}))
        assert ("- `x.npy`" in card) == (data == {"paths": "x.npy"})
