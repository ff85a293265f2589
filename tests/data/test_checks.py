"""What is refused before the first step, and with which words."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.data.args import DataArgs
from olmo_hf.data.checks import check_data
from olmo_hf.data.manifest import Manifest, ManifestFile, file_sha256, read_manifest, write_manifest
from olmo_hf.data.token_checks import TokenLimits, looks_wider
from olmo_hf.errors import DataError

RNG = np.random.default_rng(0)


def write(path: Path, tokens: list[int] | np.ndarray, dtype: str = "uint16") -> str:
    np.asarray(tokens).astype(dtype).tofile(path)
    return str(path)


def args(*paths: str, dtype: str | None = "uint16", **more) -> DataArgs:
    return DataArgs(paths=paths, token_dtype=dtype, sequence_length=8, **more)


def check(data: DataArgs, vocab_size: int | None = 1_000, batch: int | None = None, **limits) -> list[str]:
    return check_data(data, limits=TokenLimits(vocab_size=vocab_size, **limits), global_batch_size=batch)


def manifest_for(path: str, **changes) -> Manifest:
    content = dict(
        token_dtype="uint16",
        vocab_size=1_000,
        eos_token_id=0,
        pad_token_id=1,
        tokenizer="../tokenizer",
        tokenizer_sha256="",
        num_documents=1,
        num_tokens=64,
        files=(ManifestFile(Path(path).name, 64, 1, 128, file_sha256(path)),),
    )
    return Manifest(**{**content, **changes})


def test_sound_data_have_no_problems(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", RNG.integers(0, 1_000, 800))
    assert check(args(path), batch=100) == []
    assert check(args(path, check="full"), batch=100) == []


def test_every_problem_is_in_the_list(tmp_path: Path) -> None:
    good = write(tmp_path / "good.npy", RNG.integers(0, 1_000, 80))
    empty = write(tmp_path / "empty.npy", [])
    short = write(tmp_path / "short.npy", [1, 2, 3])
    (tmp_path / "odd.npy").write_bytes(b"12345")
    problems = check(args(good, empty, short, str(tmp_path / "odd.npy"), str(tmp_path / "gone.npy")))
    text = "\n".join(problems)
    assert len(problems) == 4
    assert "empty.npy: is empty" in text
    assert "short.npy: 3 tokens are shorter than one instance of 8" in text
    assert "odd.npy: 5 bytes are no whole number of uint16 tokens" in text
    assert "gone.npy: cannot be read (No such file or directory)" in text


def test_nothing_listed_and_nothing_matched(tmp_path: Path) -> None:
    assert check(args())[0].startswith("data.paths: is empty")
    assert "*.npy: matches no file" in check(args(str(tmp_path / "*.npy")))[0]
    assert "is a directory, expected token files" in check(args(str(tmp_path)))[0]


@pytest.mark.parametrize("full", ["quick", "full"])
def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path, full: str) -> None:
    tokens = RNG.integers(0, 1_000, 800)
    tokens[777] = 1_000
    path = write(tmp_path / "a.npy", tokens)
    (problem,) = check(args(path, check=full))
    assert problem.startswith(f"{path}: token 777 is id 1,000, but the model's vocabulary has 1,000")
    assert check(args(path, check=full), vocab_size=1_001) == []


def test_full_reads_what_quick_leaves_out(tmp_path: Path) -> None:
    tokens = RNG.integers(0, 1_000, 3_000_000)
    tokens[1_234_567] = 5_000
    path = write(tmp_path / "a.npy", tokens)
    assert check(args(path)) == []
    assert "token 1,234,567 is id 5,000" in check(args(path, check="full"))[0]
    # The last tokens are always read.
    tokens[2_999_999] = 5_000
    write(tmp_path / "a.npy", tokens)
    assert "token 2,999,999 is id 5,000" in check(args(path))[0]


def test_a_token_between_tokenizer_and_padded_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", [*range(90, 105), 1])
    assert check(args(path), vocab_size=128) == []
    assert "token 10 is id 100, but the tokenizer has 100" in check(args(path), vocab_size=128, tokenizer_size=100)[0]


def test_vocabulary_that_the_type_cannot_hold(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", RNG.integers(0, 60_000, 800))
    (problem,) = check(args(path), vocab_size=100_278)
    assert "uint16 holds ids up to 65,535, but the vocabulary has 100,278" in problem


def test_wider_tokens_read_as_narrow_ones(tmp_path: Path) -> None:
    tiny = write(tmp_path / "tiny.npy", np.arange(10), "uint32")
    assert "is read as uint16; correct data.token_dtype" in check(args(tiny), vocab_size=None)[0]
    real = write(tmp_path / "real.npy", RNG.integers(0, 100_278, 5_000), "uint32")
    assert "a file of uint32 is read as uint16" in check(args(real), vocab_size=60_000)[0]
    assert "a file of uint32 is read as uint16" in check(args(real), vocab_size=None)[0]


def test_narrow_tokens_read_as_wider_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", RNG.integers(0, 50_000, 5_000), "uint16")
    (problem,) = check(args(path, dtype="uint32"), vocab_size=100_278)
    assert "is id" in problem
    assert "(read as uint16 every id fits: set data.token_dtype)" in problem


@pytest.mark.parametrize("seed", range(5))
def test_true_tokens_are_not_suspected(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for vocabulary in (2, 5, 300, 50_000):
        assert not looks_wider(rng.integers(0, vocabulary, 4_096).astype(np.uint16), None)
    skewed = (rng.pareto(0.5, 4_096) % 50_000).astype(np.uint16)
    assert not looks_wider(skewed, 50_000)
    assert not looks_wider(np.zeros(100, np.uint16), None)


def test_fewer_instances_than_a_global_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", RNG.integers(0, 1_000, 80))
    assert check(args(path), batch=10) == []
    assert "10 instances of 8 tokens, fewer than one global batch of 11" in check(args(path), batch=11)[0]


def test_no_end_of_text_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.npy", RNG.integers(1, 1_000, 80))
    with caplog.at_level(logging.WARNING):
        assert check(args(path), eos_token_id=0) == []
    assert "no end-of-text id 0 among the first 80 tokens" in caplog.text


def test_label_masks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", RNG.integers(0, 1_000, 80))
    mask = write(tmp_path / "mask.npy", np.ones(80), "bool")
    assert check(args(path, label_mask_paths=(mask,))) == []
    assert "2 files for 1 token files" in check(args(path, label_mask_paths=(mask, mask)))[0]
    shorter = write(tmp_path / "shorter.npy", np.ones(79), "bool")
    assert "79 label flags for the 80 tokens" in check(args(path, label_mask_paths=(shorter,)))[0]
    tokens = write(tmp_path / "tokens.npy", np.full(80, 7), "uint8")
    assert "holds the byte 7" in check(args(path, label_mask_paths=(tokens,)))[0]


def test_manifest_gives_the_type_and_is_compared(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", RNG.integers(0, 1_000, 64))
    assert "no manifest.json beside the files says it" in check(args(path, dtype=None))[0]
    write_manifest(tmp_path, manifest_for(path))
    assert read_manifest(tmp_path) == manifest_for(path)
    assert check(args(path, dtype=None, check="full")) == []
    assert "the manifest beside it says uint16, data.token_dtype says uint8" in "\n".join(
        check(args(path, dtype="uint8"), vocab_size=None)
    )
    assert "documents end with id 0 (manifest), the model's end of text is 7" in check(args(path), eos_token_id=7)[0]
    write(tmp_path / "a.npy", RNG.integers(0, 1_000, 64))
    assert check(args(path)) == []
    assert "its checksum is not the manifest's" in check(args(path, check="full"))[0]
    write(tmp_path / "a.npy", RNG.integers(0, 1_000, 65))
    assert "130 bytes, the manifest says 128" in check(args(path))[0]


def test_a_short_last_file_of_a_manifest_is_no_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    long = write(tmp_path / "a.npy", RNG.integers(0, 1_000, 64))
    short = write(tmp_path / "b.npy", [1, 2, 3])
    files = tuple(ManifestFile(Path(p).name, n, 1, 2 * n, "") for p, n in ((long, 64), (short, 3)))
    write_manifest(tmp_path, manifest_for(long, files=files))
    with caplog.at_level(logging.WARNING):
        assert check(args(long, short, dtype=None)) == []
    assert "3 tokens are shorter than one instance of 8; none of it is used" in caplog.text


def test_manifests_of_others_and_broken_ones(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"name": "a web page"}))
    assert read_manifest(tmp_path) is None
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "olmo-hf token files", "version": 9}))
    with pytest.raises(DataError, match="has version 9, expected 1"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"format": "olmo-hf token files", "version": 1}))
    with pytest.raises(DataError, match="is incomplete"):
        read_manifest(tmp_path)


def test_ten_thousand_files_are_checked_in_linear_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = RNG.integers(0, 1_000, 16).astype(np.uint16)
    files = []
    for number in range(10_000):
        tokens.tofile(tmp_path / f"{number:05d}.npy")
        files.append(ManifestFile(f"{number:05d}.npy", 16, 1, 32, ""))
    write_manifest(tmp_path, manifest_for(str(tmp_path / "00000.npy"), files=tuple(files)))
    reads: list[str] = []

    def counted(folder: str) -> Manifest | None:
        reads.append(folder)
        return read_manifest(folder)

    monkeypatch.setattr("olmo_hf.data.manifest_lookup.read_manifest", counted)
    assert check(args(str(tmp_path / "*.npy"), dtype=None), batch=20_000) == []
    assert len(reads) == 1
