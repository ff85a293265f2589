"""Token files as they are written: whole documents, files of bounded size, continuable after a kill.

Shapes: `T` tokens of a document.
"""

import hashlib
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from olmo_hf.data.manifest import ManifestFile
from olmo_hf.data.token_files import TOKEN_DTYPES, token_dtype
from olmo_hf.errors import DataError

LABEL_MASK_FOLDER = "label_mask"


def as_dtype(tokens: np.ndarray, name: str) -> np.ndarray:
    """Ids in the type of a file. NumPy alone would wrap large ids around silently.

    Raises:
        DataError: An id does not fit.
    """
    if tokens.size and int(tokens.max()) > TOKEN_DTYPES[name]:
        raise DataError(
            f"id {int(tokens.max()):,} does not fit {name} (up to {TOKEN_DTYPES[name]:,}); use a wider type"
        )
    return tokens.astype(token_dtype(name))


@dataclass
class _OpenFile:
    """One file being written under a hidden name."""

    path: Path
    stream: BinaryIO
    digest: Any

    @classmethod
    def start(cls, final: Path, keep_bytes: int) -> "_OpenFile":
        """Opens a file for writing, keeping the first bytes of what is there already."""
        hidden = final.with_name(f".{final.name}.part")
        hidden.parent.mkdir(parents=True, exist_ok=True)
        if keep_bytes and not hidden.exists():
            # It was finished after the state was written; it is opened again.
            os.replace(final, hidden)
        digest = hashlib.sha256()
        stream = open(hidden, "r+b" if keep_bytes else "w+b")  # noqa: SIM115 (open across calls)
        stream.truncate(keep_bytes)
        left = keep_bytes
        while left:
            piece = stream.read(min(left, 2**20))
            if not piece:
                raise DataError(f"{hidden}: is shorter than its record says; remove the output and start again")
            digest.update(piece)
            left -= len(piece)
        return cls(final, stream, digest)

    def write(self, array: np.ndarray) -> None:
        content = array.tobytes()
        self.digest.update(content)
        self.stream.write(content)

    def sync(self) -> None:
        self.stream.flush()
        os.fsync(self.stream.fileno())

    def finish(self) -> tuple[int, str]:
        """Gives the file its name. Returns size and checksum."""
        self.sync()
        size_bytes = self.stream.tell()
        self.stream.close()
        os.replace(self.path.with_name(f".{self.path.name}.part"), self.path)
        return size_bytes, self.digest.hexdigest()


class SplitWriter:
    """Writes the documents of one split into numbered token files.

    A document is never cut: it goes into the next file when it does not fit, and a document longer than a file gets
    one of its own. Files have hidden names until they are finished.

    Args:
        folder: Where to; made when the first document comes.
        dtype: Type of a token.
        max_tokens_per_file: Size of a file.
        with_label_mask: Also write a label flag for every token, under `label_mask/`.
        state: What `state()` gave, to continue there; later tokens on disk are dropped.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: str,
        max_tokens_per_file: int,
        with_label_mask: bool = False,
        state: dict[str, Any] | None = None,
    ):
        self.folder = Path(folder)
        self.dtype = dtype
        self.max_tokens_per_file = max_tokens_per_file
        self.with_label_mask = with_label_mask
        self.files: list[ManifestFile] = []
        self._open: list[_OpenFile] = []
        self._tokens = self._documents = 0
        self._text_bytes: int | None = 0
        if state is not None:
            self.files = [ManifestFile(**file) for file in state["files"]]
            self._tokens, self._documents = state["open_tokens"], state["open_documents"]
            self._text_bytes = state.get("open_text_bytes")  # not noted by an older version
            self._drop_files_behind()
            if self._tokens:
                self._start_file()

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return sum(file.num_tokens for file in self.files) + self._tokens

    @property
    def num_documents(self) -> int:
        """Documents written so far."""
        return sum(file.num_documents for file in self.files) + self._documents

    def add(self, tokens: np.ndarray, label_mask: np.ndarray | None = None, *, text_bytes: int = 0) -> None:
        """Appends one document, shape (T,), with its label flags, shape (T,), if flags are written.

        Args:
            tokens: The document.
            label_mask: Its flags.
            text_bytes: Length of its text in UTF-8.
        """
        content = as_dtype(tokens, self.dtype)
        if self._tokens and self._tokens + tokens.size > self.max_tokens_per_file:
            self._finish_file()
        if not self._open:
            self._start_file()
        self._open[0].write(content)
        if self.with_label_mask:
            assert label_mask is not None
            assert label_mask.size == tokens.size
            self._open[1].write(label_mask.astype(np.bool_))
        self._tokens += tokens.size
        self._documents += 1
        self._text_bytes = None if self._text_bytes is None else self._text_bytes + text_bytes

    def state(self) -> dict[str, Any]:
        """Puts everything on disk and says how far it goes."""
        for file in self._open:
            file.sync()
        return {
            "files": [asdict(file) for file in self.files],
            "open_tokens": self._tokens,
            "open_documents": self._documents,
            "open_text_bytes": self._text_bytes,
        }

    def close(self) -> list[ManifestFile]:
        """Finishes the last file. Returns all of them."""
        if self._open:
            self._finish_file()
        return self.files

    def _names(self, number: int) -> list[Path]:
        name = f"{number:05d}.npy"
        masks = [self.folder / LABEL_MASK_FOLDER / name] if self.with_label_mask else []
        return [self.folder / name, *masks]

    def _start_file(self) -> None:
        widths = [np.dtype(self.dtype).itemsize, 1]
        names = self._names(len(self.files))
        self._open = [
            _OpenFile.start(path, self._tokens * width)
            for path, width in zip(names, widths[: len(names)], strict=True)
        ]

    def _finish_file(self) -> None:
        results = [file.finish() for file in self._open]
        self.files.append(
            ManifestFile(
                path=self._open[0].path.name,
                num_tokens=self._tokens,
                num_documents=self._documents,
                size_bytes=results[0][0],
                sha256=results[0][1],
                label_mask=f"{LABEL_MASK_FOLDER}/{self._open[1].path.name}" if self.with_label_mask else None,
                text_bytes=self._text_bytes,
            )
        )
        self._open, self._tokens, self._documents, self._text_bytes = [], 0, 0, 0

    def _drop_files_behind(self) -> None:
        """Removes what was written after the state: it will be written again."""
        first = len(self.files) + (1 if self._tokens else 0)
        for folder in (self.folder, self.folder / LABEL_MASK_FOLDER):
            for path in [*folder.glob("*.npy"), *folder.glob(".*.npy.part")]:
                number = path.name.removeprefix(".").split(".")[0]
                if number.isdigit() and int(number) >= first:
                    path.unlink()
