"""Documents from text trees, JSON lines, Parquet and `datasets`, in one fixed order, in batches.

A batch depends on the sources alone, never on how many processes work on it; so does everything made from it.
"""

import codecs
import fnmatch
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from olmo_hf.errors import DataError

SourceKind = Literal["text", "jsonl", "parquet", "rows"]

SUFFIXES: dict[str, SourceKind] = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".jsonl.zst": "jsonl",
    ".json.gz": "jsonl",
    ".json.zst": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
"""Endings of files that hold many documents. Any other file is one document of plain text."""

DEFAULT_PATTERNS = (*(f"*{suffix}" for suffix in SUFFIXES), "*.txt")
"""What is taken of a directory when no pattern is given."""

BATCH_DOCUMENTS = 256
"""Most documents of a batch."""

BATCH_BYTES = 2**20
"""A batch is closed when its documents have this size."""


READ_BYTES = 2**20
"""Read ahead in a decompressed file."""


@dataclass(frozen=True)
class SourceFile:
    """A file to read, and what tells that it was not changed."""

    path: str
    kind: SourceKind
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class DocumentBatch:
    """Documents not yet read or parsed: that is the work of whoever gets them.

    Attributes:
        number: Counts the batches from 0.
        kind: How to read `contents`: `text` has none (the place is the path), `jsonl` has lines, `rows` has values.
        contents: One per document.
        places: Where each document stands, for messages.
        size_bytes: Size of the batch in the sources, as far as it is known.
    """

    number: int
    kind: SourceKind
    contents: list[Any]
    places: list[str]
    size_bytes: int


class BadDocumentError(Exception):
    """A document that cannot be used; the message says where and why."""


def list_source_files(
    sources: Iterable[str], *, patterns: Iterable[str] = (), exclude: Iterable[str] = ()
) -> list[SourceFile]:
    """The files under some paths: sources in their order, the content of a directory sorted by name.

    Args:
        sources: Files and directories. A file is taken whatever its name.
        patterns: What to take of a directory, compared with the file's name and its path below the directory.
            Empty: the known data files and `*.txt`.
        exclude: What to leave out, compared with every part of the path below the directory and with all of it.

    Raises:
        DataError: A source is missing, or nothing is left.
    """
    sources, patterns, exclude = list(sources), list(patterns) or list(DEFAULT_PATTERNS), list(exclude)
    found: list[str] = []
    for source in sources:
        if os.path.isfile(source):
            found.append(source)
        elif os.path.isdir(source):
            below = sorted(path.relative_to(source).as_posix() for path in Path(source).rglob("*") if path.is_file())
            found += [os.path.join(source, name) for name in below if _is_taken(name, patterns, exclude)]
        else:
            raise DataError(f"{source}: no such file or directory; a data set of `datasets` is named with --dataset")
    if not found:
        raise DataError(f"{', '.join(sources)}: no file matches {', '.join(patterns)}; give a --pattern that does")
    files = []
    for path in found:
        status = os.stat(path)
        files.append(SourceFile(path, source_kind(path), status.st_size, status.st_mtime_ns))
    return files


def _is_taken(name: str, patterns: list[str], exclude: list[str]) -> bool:
    parts = name.split("/")
    if any(fnmatch.fnmatchcase(part, pattern) for pattern in exclude for part in (*parts, name)):
        return False
    return any(fnmatch.fnmatchcase(part, pattern) for pattern in patterns for part in (parts[-1], name))


def source_kind(path: str) -> SourceKind:
    """How a file is read, by its ending."""
    return next((kind for suffix, kind in SUFFIXES.items() if path.lower().endswith(suffix)), "text")


def open_source(path: str) -> BinaryIO:
    """Opens a possibly compressed file for reading. A compressed file that is cut off raises OSError at its end."""
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.lower().endswith(".zst"):
        # Of the libraries at hand only this one notices that a file ends in the middle of a frame.
        return io.BufferedReader(pa.input_stream(path, compression="zstd"), READ_BYTES)
    return open(path, "rb")


def _file_documents(file: SourceFile, column: str) -> Iterator[tuple[Any, str, int]]:
    """Content, place and size of every document of a file."""
    if file.kind == "text":
        yield None, file.path, file.size_bytes
    elif file.kind == "jsonl":
        try:
            with open_source(file.path) as stream:
                for number, line in enumerate(stream, 1):
                    yield line, f"{file.path}:{number}", len(line)
        except (OSError, EOFError, RuntimeError, zlib.error) as error:
            # The rest of such a file is never left out silently.
            raise DataError(f"{file.path}: cannot be read to its end ({error}); restore it and start again") from error
    else:
        yield from _parquet_documents(file.path, column)


def _parquet_documents(path: str, column: str) -> Iterator[tuple[Any, str, int]]:
    try:
        table = pq.ParquetFile(path)
        if column not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise DataError(f"{path}: has no column {column!r}, but {names}; name one with --text-column")
        number = 0
        for batch in table.iter_batches(batch_size=BATCH_DOCUMENTS, columns=[column]):
            for value in batch.column(0).to_pylist():
                yield value, f"{path}:row {number}", _size_of(value)
                number += 1
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read ({error}); restore it and start again") from error


def _size_of(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes)) else len(str(value))


def file_batches(files: Iterable[SourceFile], *, column: str, max_documents: int | None) -> Iterator[DocumentBatch]:
    """Batches of the documents of some files. A batch never mixes kinds.

    Args:
        files: What to read, in this order.
        column: Field of the text in JSON lines and Parquet.
        max_documents: Stop after so many documents. None: read all.
    """
    documents = (
        ("rows" if file.kind == "parquet" else file.kind, *document)
        for file in files
        for document in _file_documents(file, column)
    )
    return _batches(documents, max_documents)


def load_rows(dataset: str, split: str, column: str) -> Any:
    """One split of a `datasets` data set, by name or by directory.

    Raises:
        DataError: It cannot be loaded, or lacks the column.
    """
    import datasets

    try:
        if os.path.isfile(os.path.join(dataset, "state.json")):
            rows = datasets.load_from_disk(dataset)
        elif os.path.isfile(os.path.join(dataset, "dataset_dict.json")):
            rows = datasets.load_from_disk(dataset)[split]
        else:
            rows = datasets.load_dataset(dataset, split=split)
    except (OSError, KeyError, ValueError, datasets.exceptions.DatasetsError) as error:
        why = f"{error}: {error.__cause__}" if error.__cause__ is not None else str(error)
        raise DataError(
            f"--dataset: {dataset} (split {split}) cannot be loaded ({why}); check name, configuration and connection"
        ) from error
    if column not in rows.column_names:
        names = ", ".join(rows.column_names)
        raise DataError(f"{dataset}: has no column {column!r}, but {names}; name one with --text-column")
    return rows


def row_batches(rows: Iterable[dict[str, Any]], *, column: str, max_documents: int | None) -> Iterator[DocumentBatch]:
    """Batches of the rows of a `datasets` data set."""
    documents = (("rows", row.get(column), f"row {i}", _size_of(row.get(column))) for i, row in enumerate(rows))
    return _batches(documents, max_documents)


def _batches(documents: Iterable[tuple[Any, Any, str, int]], max_documents: int | None) -> Iterator[DocumentBatch]:
    number, kind = 0, "text"
    contents: list[Any] = []
    places: list[str] = []
    size_bytes = 0
    for count, (this_kind, content, place, size) in enumerate(documents):
        if max_documents is not None and count >= max_documents:
            break
        full = len(contents) == BATCH_DOCUMENTS or size_bytes + size > BATCH_BYTES or this_kind != kind
        if contents and full:
            yield DocumentBatch(number, kind, contents, places, size_bytes)  # type: ignore[arg-type]
            number, contents, places, size_bytes = number + 1, [], [], 0
        kind = this_kind
        contents.append(content)
        places.append(place)
        size_bytes += size
    if contents:
        yield DocumentBatch(number, kind, contents, places, size_bytes)  # type: ignore[arg-type]


def read_document(kind: SourceKind, content: Any, place: str, column: str) -> Any:
    """The value of a document: its text, or whatever else its column holds.

    Raises:
        BadDocumentError: It is not UTF-8, not JSON, or lacks the column.
    """
    if kind == "rows":
        value = content
    elif kind == "text":
        try:
            # Some editors begin a file with a mark that is no part of its text.
            return Path(place).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadDocumentError(f"{place}: {_not_utf8(error)}") from error
        except OSError as error:
            raise BadDocumentError(f"{place}: cannot be read ({error.strerror or error})") from error
    else:
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise BadDocumentError(f"{place}: no JSON ({error})") from error
        if not isinstance(record, dict) or column not in record:
            raise BadDocumentError(f"{place}: no field {column!r}")
        value = record[column]
    if value is None:
        raise BadDocumentError(f"{place}: {column!r} is empty")
    _refuse_half_characters(value, place)
    return value


def _not_utf8(error: UnicodeDecodeError) -> str:
    """Why a text cannot be read, and what it probably is."""
    if error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "UTF-16, not UTF-8; `iconv -f UTF-16 -t UTF-8` converts it"
    byte = f"byte 0x{error.object[error.start]:02x} at {error.start:,}"
    return f"not UTF-8 ({byte}); `iconv -f ENCODING -t UTF-8` converts it"


def _refuse_half_characters(value: Any, place: str) -> None:
    """JSON can spell half of a surrogate pair, which is no text: tokenizers refuse the whole batch for it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadDocumentError(f"{place}: {error}") from error
    elif isinstance(value, dict):
        for key, part in value.items():
            _refuse_half_characters(key, place)
            _refuse_half_characters(part, place)
    elif isinstance(value, list):
        for part in value:
            _refuse_half_characters(part, place)


def in_validation(text: str, fraction: float) -> bool:
    """Whether a document belongs to the validation split: decided by its text alone, so duplicates stay together."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
