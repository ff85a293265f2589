"""Documents, in whatever form they come."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from olmo_hf.data import document_sources
from olmo_hf.data.document_sources import (
    BadDocumentError,
    file_batches,
    in_validation,
    list_source_files,
    read_document,
)
from olmo_hf.errors import DataError

TEXTS = [f"document {i} \u00e9" for i in range(700)]


def all_texts(*paths: Path, **options) -> list[str]:
    files = list_source_files([str(p) for p in paths], **options)
    batches = list(file_batches(files, column="text", max_documents=None))
    assert [batch.number for batch in batches] == list(range(len(batches)))
    return [
        read_document(batch.kind, content, place, "text")
        for batch in batches
        for content, place in zip(batch.contents, batch.places, strict=True)
    ]


def test_every_form_gives_the_same_documents(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    half = len(lines) // 2
    frames = zstandard.compress(lines[:half]) + zstandard.compress(lines[half:])
    (tmp_path / "a.jsonl.zst").write_bytes(frames)
    pq.write_table(pa.table({"text": TEXTS, "n": range(700)}), tmp_path / "a.parquet", row_group_size=100)
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        assert all_texts(tmp_path / name) == TEXTS, name
    assert all_texts(tmp_path) == TEXTS * 4


def test_trees_patterns_and_exclusions(tmp_path: Path) -> None:
    for name in ("b/x.py", "a/y.py", "a/test/z.py", "a/readme.md", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert all_texts(tmp_path) == ["c.txt"]
    assert all_texts(tmp_path, patterns=["*.py"]) == ["a/test/z.py", "a/y.py", "b/x.py"]
    assert all_texts(tmp_path, patterns=["*.py"], exclude=["test"]) == ["a/y.py", "b/x.py"]
    assert all_texts(tmp_path, patterns=["*.py", "*.md"], exclude=["a/*.py"]) == ["a/readme.md", "b/x.py"]
    # A file that is named is taken whatever its name.
    assert all_texts(tmp_path / "a/readme.md") == ["a/readme.md"]
    with pytest.raises(DataError, match=r"no file matches \*\.rs"):
        all_texts(tmp_path, patterns=["*.rs"])
    with pytest.raises(DataError, match="no such file or directory"):
        all_texts(tmp_path / "gone")


def test_batches_are_bounded_and_do_not_mix_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_sources, "BATCH_BYTES", 100)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (1, 2, 300, 1)))
    files = list_source_files([str(tmp_path)])
    batches = list(file_batches(files, column="text", max_documents=None))
    assert [(b.kind, len(b.contents)) for b in batches] == [("text", 1), ("jsonl", 2), ("jsonl", 1), ("jsonl", 1)]
    assert batches[2].places == [f"{tmp_path / 'b.jsonl'}:3"]
    limited = list(file_batches(files, column="text", max_documents=3))
    assert sum(len(b.contents) for b in limited) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "no JSON"),
        (b"[1]", "no field 'text'"),
        (b'{"txt": "x"}', "no field 'text'"),
        (b'{"text": null}', "'text' is empty"),
        (b'{"text": "\xff"}', "no JSON"),
    ],
)
def test_bad_lines_say_where_and_why(content: bytes, said: str) -> None:
    with pytest.raises(BadDocumentError, match=said) as caught:
        read_document("jsonl", content, "x.jsonl:7", "text")
    assert str(caught.value).startswith("x.jsonl:7: ")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(BadDocumentError, match=r"latin\.txt: not UTF-8 \(byte 0x\w\w at [\d,]+\); `iconv"):
        read_document("text", None, str(tmp_path / "latin.txt"), "text")
    (tmp_path / "editor.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(BadDocumentError, match=r"editor\.txt: UTF-16, not UTF-8; `iconv -f UTF-16"):
        read_document("text", None, str(tmp_path / "editor.txt"), "text")


def test_endings_in_capitals_and_marks_of_byte_order(tmp_path: Path) -> None:
    line = json.dumps({"text": "a"}).encode() + b"\n"
    (tmp_path / "A.JSONL.GZ").write_bytes(gzip.compress(line))
    (tmp_path / "B.JSONL.ZST").write_bytes(zstandard.compress(line))
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + line)
    (tmp_path / "d.txt").write_bytes(b"\xef\xbb\xbfa")
    for name in ("A.JSONL.GZ", "B.JSONL.ZST", "c.jsonl", "d.txt"):
        assert all_texts(tmp_path / name) == ["a"], name


def test_links_that_lead_back_and_pipes_are_passed_by(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("a")
    (tmp_path / "sub" / "back").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "itself.txt").symlink_to("itself.txt")
    (tmp_path / "nowhere.txt").symlink_to("gone.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    assert all_texts(tmp_path) == ["a"]


def test_a_file_cut_off_is_an_error_not_an_end(tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-100])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz: cannot be read to its end"):
        all_texts(tmp_path / "cut.jsonl.gz")
    (tmp_path / "cut.jsonl.zst").write_bytes(zstandard.compress(gzip.decompress(whole))[:-100])
    with pytest.raises(DataError, match=r"cut\.jsonl\.zst: cannot be read to its end"):
        all_texts(tmp_path / "cut.jsonl.zst")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"cut\.parquet: cannot be read"):
        all_texts(tmp_path / "cut.parquet")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(DataError, match="has no column 'text', but body"):
        all_texts(tmp_path / "other.parquet")


def test_validation_is_chosen_by_the_text() -> None:
    chosen = [in_validation(text, 0.1) for text in TEXTS]
    assert chosen == [in_validation(text, 0.1) for text in TEXTS]
    # 700 draws at 0.1: within five standard deviations (7.9) of 70.
    assert abs(sum(chosen) - 70) < 40
    assert not any(in_validation(text, 0.0) for text in TEXTS)
    # A larger share contains the smaller one.
    assert all(in_validation(text, 0.2) for text in TEXTS if in_validation(text, 0.1))
