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
    """What was read: path, kind, documents and bytes of each source."""

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
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); prepare the data again or set data.token_dtype") from error
    # A manifest.json may belong to another program; only ours says this.
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    if content.get("version") != VERSION:
        raise DataError(f"{path}: has version {content.get('version')}, expected {VERSION}; prepare the data again")
    known = {f.name for f in fields(Manifest)}
    try:
        values = {key: value for key, value in content.items() if key in known}
        values["files"] = tuple(ManifestFile(**file) for file in values["files"])
        values["sources"] = tuple(values["sources"])
        return Manifest(**values)
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: is incomplete ({error}); prepare the data again") from error


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Checksum of a file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
