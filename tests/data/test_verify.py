"""The full check of prepared data, and of token files from elsewhere."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.cli import prepare_data as cli
from olmo_hf.data.prepare import prepare_data
from olmo_hf.data.prepare_options import PrepareOptions
from olmo_hf.data.verify import verify_files, verify_prepared
from olmo_hf.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden" / "04_memmap" / "data"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"text": f"document {i} " * 9}) + "\n" for i in range(50)))
    prepare_data(
        PrepareOptions(
            sources=(str(tmp_path / "s.jsonl"),),
            output=str(tmp_path / "out"),
            train_tokenizer=300,
            validation_fraction=0.2,
            max_tokens_per_file=400,
        )
    )
    return tmp_path / "out"


def test_sound_data(prepared: Path) -> None:
    facts, problems = verify_prepared(str(prepared))
    assert problems == []
    assert sum(fact.num_documents or 0 for fact in facts) == 50
    assert verify_prepared(str(prepared / "train"))[1] == []


def damage(path: Path, place: int, token: int) -> None:
    tokens = np.fromfile(path, np.uint16)
    tokens[place] = token
    tokens.tofile(path)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("id", "token 3 is id 300, but the tokenizer has"),
        ("changed", "its checksum is not the manifest's"),
        ("extra end", "the manifest says"),
        ("no end", "ends in the middle of a document (last id 5)"),
        ("cut", "the manifest says"),
        ("gone", "cannot be read"),
        ("stray", "is not in the manifest"),
        ("tokenizer", "is not the tokenizer the tokens were made with"),
        ("no tokenizer", "is missing"),
    ],
)
def test_every_damage_is_named(prepared: Path, what: str, said: str) -> None:
    path = prepared / "train" / "00001.npy"
    tokenizer = prepared / "tokenizer" / "tokenizer.json"
    {
        "id": lambda: damage(path, 3, 300),
        "changed": lambda: damage(path, 3, 7 + int(np.fromfile(path, np.uint16)[3] == 7)),
        "extra end": lambda: damage(path, 3, 0),
        "no end": lambda: damage(path, -1, 5),
        "cut": lambda: path.write_bytes(path.read_bytes()[:-10]),
        "gone": path.unlink,
        "stray": lambda: (prepared / "train" / "x.npy").write_bytes(b""),
        "tokenizer": lambda: tokenizer.write_text(tokenizer.read_text() + " "),
        "no tokenizer": tokenizer.unlink,
    }[what]()
    problems = verify_prepared(str(prepared))[1]
    assert any(said in problem for problem in problems), problems


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no manifest\.json"):
        verify_prepared(str(tmp_path))


def test_the_originals_files() -> None:
    path = str(GOLDEN / "part_0.uint16.npy")
    facts, problems = verify_files([path], dtype="uint16", vocab_size=65_536, eos_token_id=3)
    tokens = np.fromfile(path, np.uint16)
    assert problems == []
    assert facts[0].num_tokens == 83
    assert facts[0].largest_token == tokens.max()
    assert facts[0].num_documents == np.count_nonzero(tokens == 3) + (tokens[-1] != 3)
    problems = verify_files([path, "gone"], dtype="uint16", vocab_size=1_000, eos_token_id=3)[1]
    assert len(problems) == 2


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(list(arguments)))


def test_the_command(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--verify", str(prepared)) == 0
    assert "nothing is wrong" in capsys.readouterr().err
    path = prepared / "train" / "00000.npy"
    assert run("--verify", str(path), "--token-dtype", "uint16", "--tokenizer", str(prepared / "tokenizer")) == 0
    damage(path, 0, 9_999)
    assert run("--verify", str(prepared), str(path), "--token-dtype", "uint16") == 1
    assert "token 0 is id 9,999" in capsys.readouterr().err
    with pytest.raises(DataError, match="--token-dtype: is needed"):
        run("--verify", str(path))
    with pytest.raises(DataError, match="--output: is not given"):
        run(str(path))
