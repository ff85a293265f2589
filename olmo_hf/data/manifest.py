"""The `manifest.json` beside prepared token files: what they are and what they were made of."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from olmo_hf.errors import DataError

MANIFEST_NAME = "manifest.json"

FORMAT = "olmo-hf token files"

VERSION = 1


@dataclass(frozen=True)
class ManifestFile:
    """One token file of a folder."""

    path: str
    """Relative to the manifest."""

    num_tokens: int
    """Tokens, end-of-text tokens included."""

    num_documents: int
    """Whole documents; each ends with one end-of-text token."""

    size_bytes: int
    """Size on disk."""

    sha256: str
    """Checksum of the bytes."""

    label_mask: str | None = None
    """File of label flags, relative to the manifest."""

    text_bytes: int | None = None
    """Length of the documents' text in UTF-8, without end-of-text tokens; None in older manifests."""


@dataclass(frozen=True)
class Manifest:
    """All token files of a folder."""

    token_dtype: str
    """Type of a token on disk."""

    vocab_size: int
    """Size of the tokenizer, added tokens included."""

    eos_token_id: int
    """Id that ends every document."""

    pad_token_id: int | None
    """Padding id of the tokenizer."""

    tokenizer: str
    """Folder of the tokenizer, relative to the manifest."""

    tokenizer_sha256: str
    """Checksum of its `tokenizer.json`."""

    num_documents: int
    num_tokens: int
    files: tuple[ManifestFile, ...]
    sources: tuple[dict[str, Any], ...] = ()
    """What was read: path, number of files and bytes of each source; or name and split of a data set."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Options of the preparation that decide its result."""

    def file(self, name: str) -> ManifestFile | None:
        """What is said of one file."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, ManifestFile]:
        return {file.path: file for file in self.files}


def write_manifest(folder: str | os.PathLike[str], manifest: Manifest) -> None:
    """Writes a folder's manifest in one atomic step: it is there whole or not at all."""
    path = Path(folder) / MANIFEST_NAME
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    hidden = path.with_name(f".{MANIFEST_NAME}.tmp")
    with open(hidden, "w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(hidden, path)


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """A folder's manifest, or None when it has none.

    Raises:
        DataError: There is one, but it cannot be understood.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(str(path), error) from error
    return parse_manifest(text, str(path))


def parse_manifest(text: str, path: str) -> Manifest | None:
    """A manifest from its text; None when the text is no manifest of ours.

    Args:
        text: Content of the file.
        path: The file, for messages.

    Raises:
        DataError: It is one, but cannot be understood.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    # A manifest.json may belong to another program; only ours says this.
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    if content.get("version") != VERSION:
        raise DataError(f"{path}: has version {content.get('version')}, expected {VERSION}; prepare the data again")
    known = {f.name for f in fields(Manifest)}
    try:
        values = {key: value for key, value in content.items() if key in known}
        values["files"] = tuple(ManifestFile(**file) for file in values["files"])
        values["sources"] = tuple(values.get("sources", ()))
        manifest = Manifest(**values)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: is incomplete ({error}); prepare the data again") from error
    wrong = _wrong_types(manifest)
    if wrong:
        raise DataError(f"{path}: {', '.join(wrong)} cannot be understood; prepare the data again")
    return manifest


def _unreadable(path: str, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read ({error}); prepare the data again or set data.token_dtype")


def _wrong_types(manifest: Manifest) -> list[str]:
    """Fields that hold something else than they should."""
    wrong = [
        name
        for name in ("token_dtype", "tokenizer", "tokenizer_sha256")
        if not isinstance(getattr(manifest, name), str)
    ]
    wrong += [name for name in ("vocab_size", "eos_token_id") if not _is_count(getattr(manifest, name))]
    for file in manifest.files:
        numbers = (
            file.num_tokens,
            file.num_documents,
            file.size_bytes,
            0 if file.text_bytes is None else file.text_bytes,
        )
        texts = (file.path, file.sha256, "" if file.label_mask is None else file.label_mask)
        if not all(map(_is_count, numbers)) or not all(isinstance(text, str) for text in texts):
            wrong.append(f"the entry of {file.path!r}")
    return wrong


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Checksum of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
