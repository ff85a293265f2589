"""Single translations, without a file."""

from typing import Any

import pytest
import yaml

from olmo_hf.model.conversion.architecture import ORIGINAL_DEFAULTS
from olmo_hf.recipes.ledger import Ledger
from olmo_hf.recipes.original_defaults import flat_defaults
from olmo_hf.recipes.original_file import flatten
from olmo_hf.recipes.translate_data import translate_data
from olmo_hf.recipes.translate_model import translate_tokenizer
from olmo_hf.recipes.translate_run import translate_saving
from olmo_hf.recipes.translate_training import translate_length
from tests.recipes.test_import_config import GOLDEN


def ledger(**given: Any) -> Ledger:
    return Ledger({key.replace("__", "."): value for key, value in given.items()}, flat_defaults())


def test_every_key_that_the_original_writes_is_known():
    written = set(flatten(yaml.safe_load(GOLDEN.read_text())))
    model = {f"model.{name}" for name in ORIGINAL_DEFAULTS}
    blocks = {"evaluators", "compile", "fsdp", "data.instance_filter"}
    assert written - model - blocks <= set(flat_defaults())


SAVING = [
    # save_interval, kept, save_interval_unsharded, kept; what becomes of them
    ({}, (1000, None, -1, -1)),
    ({"save_num_checkpoints_to_keep": 0, "save_interval_unsharded": 500}, (None, 500, -1, -1)),
    ({"save_interval": 100, "save_num_checkpoints_to_keep": 9}, (100, None, 9, -1)),
    ({"save_interval_unsharded": 100, "save_num_unsharded_checkpoints_to_keep": 0}, (1000, None, -1, -1)),
    ({"distributed_strategy": "ddp"}, (None, 1000, -1, -1)),
    ({"distributed_strategy": "ddp", "load_path": "/x/step1"}, (None, None, -1, -1)),
]


@pytest.mark.parametrize(("given", "expected"), SAVING)
def test_series_of_checkpoints(given, expected):
    book = ledger(**given)
    translate_saving(book)
    names = ("save_interval", "save_interval_unsharded", "keep_sharded", "keep_unsharded")
    assert tuple(book.settings[f"training.{name}"] for name in names) == expected


def test_a_published_list_is_named():
    from olmo_hf.data.mixes import read_mix

    paths = read_mix("dolma15").paths("r2://somewhere")
    book = ledger(data__paths=paths)
    translate_data(book, {"paths": paths}, sequence_length=32)
    assert (book.settings["data.mix"], book.settings["data.mix_base"]) == ("dolma15", "r2://somewhere")
    changed = [*paths[1:], paths[0]]
    book = ledger(data__paths=changed)
    translate_data(book, {"paths": changed}, sequence_length=32)
    assert book.settings["data.paths"] == changed


def test_a_tokenizer_that_came_with_the_original_is_found_on_the_hub(tmp_path):
    book = ledger(tokenizer__identifier="tokenizers/allenai_dolma2.json")
    translate_tokenizer(book)
    assert book.settings["model.tokenizer"] == "allenai/dolma2-tokenizer"
    book = ledger(tokenizer__identifier=str(tmp_path / "t.json"))
    translate_tokenizer(book)
    assert book.settings["model.tokenizer"] == str(tmp_path / "t.json")


@pytest.mark.parametrize("value", ["1.5ep", 0, "many", None])
def test_a_length_that_is_none_is_refused(value):
    book = ledger(max_duration=value)
    translate_length(book, sequence_length=32)
    assert book.verdicts["max_duration"].status == "refused"
