"""One file of token ids: where its tokens lie, how many there are, and reading a stretch of them.

A token file is a headerless array of unsigned integers, whatever its suffix (spec: data.md section 2). A file that
NumPy wrote with a header is recognised and its header skipped; it is never read as tokens.
"""

import io
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy_format

from olmo_hf.data.remote import describe_remote, is_remote, read_remote, refuses_changed
from olmo_hf.errors import DataError

TOKEN_DTYPES = {"uint8": 255, "uint16": 2**16 - 1, "uint32": 2**32 - 1, "uint64": 2**64 - 1}
"""Names a token type may have, and the largest id each holds."""

CONFIRM_SECONDS = 60.0
"""How long a remote file is taken for unchanged where the server does not compare it with every read."""

MAX_OPEN_FILES = 256
"""Files a process keeps open: below the usual limit of 1,024 per process, above what a few batches touch."""


@dataclass(frozen=True)
class TokenFile:
    """A token file as it was when it was opened.

    Attributes:
        path: Where it is.
        dtype: Type of one token.
        offset_bytes: Where the tokens begin (behind a NumPy header, else 0).
        num_tokens: How many there are.
        size_bytes: Size of the whole file.
        identity: For a remote file, a mark that changes with its content ("" where there is none).
    """

    path: str
    dtype: np.dtype
    offset_bytes: int
    num_tokens: int
    size_bytes: int
    identity: str = ""


def token_dtype(name: str) -> np.dtype:
    """The NumPy type of a token type's name.

    Raises:
        DataError: `name` is none of uint8, uint16, uint32, uint64.
    """
    if name not in TOKEN_DTYPES:
        raise DataError(f"data.token_dtype: found {name!r}, expected one of {', '.join(TOKEN_DTYPES)}")
    return np.dtype(name).newbyteorder("<")


def num_instances(num_tokens: int, sequence_length: int, stride_tokens: int) -> int:
    """Instances in a file of `num_tokens`."""
    return 0 if num_tokens < sequence_length else (num_tokens - sequence_length) // stride_tokens + 1


class NpyHeader(NamedTuple):
    """What a NumPy header says of the array behind it."""

    dtype: np.dtype
    offset_bytes: int
    num_tokens: int


def read_npy_header(stream: BinaryIO, path: str) -> NpyHeader | None:
    """Type, offset and length of the array in a file with a NumPy header, or None when there is no header.

    Raises:
        DataError: There is a header, but of an array that cannot be a stream of tokens.
    """
    if stream.read(len(npy_format.MAGIC_PREFIX)) != npy_format.MAGIC_PREFIX:
        return None
    stream.seek(0)
    try:
        version = npy_format.read_magic(stream)
        read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except ValueError as error:
        raise DataError(
            f"{path}: begins as a NumPy file, but its header cannot be read ({error}); write the file again"
        ) from error
    if len(shape) != 1 or dtype.kind not in "ub":
        raise DataError(
            f"{path}: is a NumPy array of type {dtype} and shape {shape}, expected one dimension of unsigned integers"
        )
    if not dtype.isnative and dtype.itemsize > 1:
        raise DataError(
            f"{path}: its bytes are in the order of another kind of machine ({dtype}); save it again as {dtype.name}"
        )
    return NpyHeader(dtype, stream.tell(), shape[0])


REMOTE_CONNECTIONS = 32
"""Remote files looked at at the same time."""

HEADER_BYTES = 4_096
"""Read of a remote file to see whether it has a header; the headers of one-dimensional arrays take 128."""


def open_token_file(path: str, dtype: np.dtype) -> TokenFile:
    """Looks at a file's size and header.

    Args:
        path: A local file, or a remote one.
        dtype: The type its tokens are said to have.

    Raises:
        DataError: The file is missing, unreadable, of another type, or not a whole number of tokens.
    """
    if is_remote(path):
        size_bytes, identity = describe_remote(path)
        head = io.BytesIO(read_remote(path, 0, min(HEADER_BYTES, size_bytes), identity) if size_bytes else b"")
        return replace(describe_token_file(path, dtype, size_bytes, read_npy_header(head, path)), identity=identity)
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            # Opening a pipe would wait for somebody to write into it.
            raise DataError(f"{path}: is no regular file; copy what it gives into one")
        with open(path, "rb") as stream:
            header = read_npy_header(stream, path)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({said}); correct data.paths or restore the file") from error
    size_bytes = status.st_size
    return describe_token_file(path, dtype, size_bytes, header)


def open_token_files(paths: Sequence[str], dtype: np.dtype) -> tuple[dict[str, TokenFile], list[str]]:
    """Looks at many files; remote ones many at a time, since each takes two answers of a server.

    Returns:
        What was found, by path, and what is wrong with the others.
    """
    distinct = list(dict.fromkeys(paths))

    def attempt(path: str) -> TokenFile | DataError:
        try:
            return open_token_file(path, dtype)
        except DataError as error:
            return error

    if any(is_remote(path) for path in distinct):
        with ThreadPoolExecutor(REMOTE_CONNECTIONS) as pool:
            results = list(pool.map(attempt, distinct))
    else:
        results = [attempt(path) for path in distinct]
    found = {path: result for path, result in zip(distinct, results, strict=True) if isinstance(result, TokenFile)}
    return found, [str(result) for result in results if isinstance(result, DataError)]


def describe_token_file(path: str, dtype: np.dtype, size_bytes: int, header: NpyHeader | None) -> TokenFile:
    """Checks what is known of a file before any token is read. See `open_token_file`."""
    offset_bytes = 0
    if header is not None:
        found, offset_bytes, told = header
        if found != dtype:
            raise DataError(f"{path}: its NumPy header says {found}, expected {dtype}; set data.token_dtype: {found}")
        if offset_bytes + told * dtype.itemsize != size_bytes:
            raise DataError(
                f"{path}: its NumPy header says {told:,} tokens, but {size_bytes - offset_bytes:,} bytes follow, "
                f"expected {told * dtype.itemsize:,}; the file is cut off or was added to. Write it again"
            )
    num_tokens, rest = divmod(size_bytes - offset_bytes, dtype.itemsize)
    if rest:
        raise DataError(
            f"{path}: {size_bytes:,} bytes are no whole number of {dtype} tokens ({dtype.itemsize} bytes each); "
            "the file is cut off: restore it, or data.token_dtype is wrong: correct it"
        )
    return TokenFile(path, dtype, offset_bytes, num_tokens, size_bytes)


class TokenReader:
    """Reads stretches of token files and keeps the files it used last open.

    Positioned reads rather than a memory map: a file that shrinks or a disk that fails then gives an error with the
    file's name, where a map would end the process with a bus error. The bytes come from the same page cache.
    Pickles without its open files; every process opens its own. Remote files are read over their protocol.
    """

    def __init__(self) -> None:
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._confirmed: dict[str, tuple[int, float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # Bound here: at the end of the process the module's names may be gone already.
        for descriptor in self._descriptors.values():
            close(descriptor)

    def read(self, file: TokenFile, first_token: int, num_tokens: int) -> np.ndarray:
        """Tokens `[first_token, first_token + num_tokens)` of a file, (num_tokens,), in the file's type.

        Raises:
            DataError: The file cannot be read, or is not the one that was opened at the start.
        """
        tokens = np.empty(num_tokens, file.dtype)
        self.read_into(file, first_token, tokens)
        return tokens

    def read_into(self, file: TokenFile, first_token: int, row: np.ndarray) -> None:
        """Identical to `read` except that the tokens are put into an array of as many tokens of as many bytes."""
        first_byte = file.offset_bytes + first_token * file.dtype.itemsize
        if is_remote(file.path):
            self._confirm(file)
            row.view(np.uint8)[:] = np.frombuffer(
                read_remote(file.path, first_byte, row.nbytes, file.identity), np.uint8
            )
            return
        try:
            descriptor = self._descriptors.get(file.path)
            if descriptor is None:
                descriptor = self._open(file)
            got_bytes = os.preadv(descriptor, [row.data], first_byte)
            # One call gives at most 2 GiB, and may be cut short by a signal.
            while 0 < got_bytes < row.nbytes:
                more = os.preadv(descriptor, [row.view(np.uint8).data[got_bytes:]], first_byte + got_bytes)
                if not more:
                    break
                got_bytes += more
        except OSError as error:
            raise DataError(
                f"{file.path}: tokens from {first_token:,} on cannot be read ({error.strerror or error}); restore "
                "the file and start again"
            ) from error
        if got_bytes != row.nbytes:
            raise DataError(
                f"{file.path}: ends {row.nbytes - got_bytes:,} bytes short of token {first_token + row.size:,}; "
                "it was changed while in use. Restore it and start again"
            )

    def _confirm(self, file: TokenFile) -> None:
        """Asks in every process whether a remote file is still the one that was opened at the start.

        Once, where the server compares the file with every read; elsewhere again after a while.
        """
        process, seconds = self._confirmed.get(file.path, (-1, 0.0))
        recent = refuses_changed(file.path, file.identity) or time.monotonic() - seconds < CONFIRM_SECONDS
        if process == os.getpid() and recent:
            return
        size_bytes, identity = describe_remote(file.path)
        if (size_bytes, identity) != (file.size_bytes, file.identity):
            raise DataError(f"{file.path}: was changed since the start. Restore it and start again")
        self._confirmed[file.path] = (os.getpid(), time.monotonic())

    def _open(self, file: TokenFile) -> int:
        descriptor = os.open(file.path, os.O_RDONLY)
        found_bytes = os.fstat(descriptor).st_size
        if found_bytes != file.size_bytes:
            os.close(descriptor)
            raise DataError(
                f"{file.path}: has {found_bytes:,} bytes, expected {file.size_bytes:,} as at the start; "
                "it was changed while in use. Restore it and start again"
            )
        self._descriptors[file.path] = descriptor
        if len(self._descriptors) > MAX_OPEN_FILES:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor
