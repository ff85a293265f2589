"""Tokenizers as they are trained, saved and read back."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from olmo_hf.data.tokenizer_files import (
    EOS_TOKEN,
    PAD_TOKEN,
    TRICKY_TEXTS,
    differing_texts,
    raw_tokenizer,
    read_tokenizer,
    save_tokenizer,
    take_over_tokenizer,
    train_tokenizer,
)
from olmo_hf.errors import DataError

TEXTS = [*TRICKY_TEXTS, *(f"def function_{i}(x): return x + {i}\n" for i in range(200))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(iter(TEXTS), 400), folder, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN)
    return folder


def test_a_trained_tokenizer(folder: Path) -> None:
    files = read_tokenizer(folder)
    assert (files.vocab_size, files.eos_token_id, files.pad_token_id) == (402, 0, 1)
    raw = raw_tokenizer(folder)
    for text in (*TRICKY_TEXTS, "\x00\x7f", "unseen \u0416"):
        assert raw.decode(raw.encode(text).ids, skip_special_tokens=False) == text
    auto = AutoTokenizer.from_pretrained(folder)
    assert auto.decode([0]) == EOS_TOKEN
    assert auto.decode([1]) == PAD_TOKEN


def test_training_is_deterministic(folder: Path, tmp_path: Path) -> None:
    for number in range(3):
        save_tokenizer(
            train_tokenizer(iter(TEXTS), 400), tmp_path / str(number), eos_token=EOS_TOKEN, pad_token=PAD_TOKEN
        )
        assert read_tokenizer(tmp_path / str(number)).sha256 == read_tokenizer(folder).sha256


def test_too_small_a_vocabulary() -> None:
    with pytest.raises(DataError, match="found 100, expected 256 or more"):
        train_tokenizer(iter(TEXTS), 100)


def test_both_readings_agree_before_and_after_saving(folder: Path, tmp_path: Path) -> None:
    auto = AutoTokenizer.from_pretrained(folder)
    auto.save_pretrained(tmp_path)
    for where in (folder, tmp_path):
        assert differing_texts(raw_tokenizer(where), AutoTokenizer.from_pretrained(where)) == []
        assert raw_tokenizer(where).encode("12345").ids == raw_tokenizer(folder).encode("12345").ids


def misread(folder: Path) -> Path:
    """A tokenizer whose configuration names a class that rebuilds it with another splitter."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=402,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # Merges of digits, which only a splitter that keeps numbers whole can reach.
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab["12"] = len(vocab)
    content["model"]["merges"].append(["1", "2"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN})
    )
    return folder


def test_tokenizer_json_decides_and_the_saved_one_is_read_alike(tmp_path: Path) -> None:
    source = misread(tmp_path / "source")
    raw = raw_tokenizer(source)
    assert differing_texts(raw, AutoTokenizer.from_pretrained(source)), "the pinned transformers reads both alike"
    with pytest.raises(DataError, match=r"AutoTokenizer and tokenizer\.json disagree"):
        read_tokenizer(source)
    files = take_over_tokenizer(str(source), tmp_path / "taken", eos_token=None)
    auto = AutoTokenizer.from_pretrained(tmp_path / "taken")
    for text in TRICKY_TEXTS:
        assert auto(text)["input_ids"] == raw.encode(text).ids
    assert (files.eos_token_id, files.pad_token_id) == (0, 1)


def test_end_of_text_must_be_named(folder: Path, tmp_path: Path) -> None:
    bare = folder / "tokenizer.json"
    with pytest.raises(DataError, match="names no end-of-text token"):
        take_over_tokenizer(str(bare), tmp_path / "a", eos_token=None)
    assert take_over_tokenizer(str(bare), tmp_path / "b", eos_token=EOS_TOKEN).eos_token_id == 0
    with pytest.raises(DataError, match="'<eos>' is no token of"):
        take_over_tokenizer(str(folder), tmp_path / "c", eos_token="<eos>")
    # Another one than the tokenizer says.
    assert take_over_tokenizer(str(folder), tmp_path / "d", eos_token=PAD_TOKEN).eos_token_id == 1


def test_a_tokenizer_in_place_is_left_alone(folder: Path) -> None:
    before = (folder / "tokenizer.json").stat().st_mtime_ns
    assert take_over_tokenizer(str(folder), folder, eos_token=None).vocab_size == 402
    assert (folder / "tokenizer.json").stat().st_mtime_ns == before


def test_what_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"--tokenizer: none can be loaded from .*empty"):
        take_over_tokenizer(str(tmp_path / "empty"), tmp_path / "x", eos_token=None)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match=r"broken\.json: is no tokenizer\.json"):
        take_over_tokenizer(str(tmp_path / "broken.json"), tmp_path / "x", eos_token=None)
