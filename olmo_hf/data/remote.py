"""Token files that are not on this machine: sizes and stretches of bytes over fsspec, patiently.

Every read asks for exact bytes and gets exactly those, or raises. What may pass (a lost connection, a server in
trouble, an answer cut short) is tried again with growing pauses; what will not (no such file, no permission) is not.
"""

import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from olmo_hf.errors import DataError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
"""Times a read is tried before it is given up."""

FIRST_PAUSE_SECONDS = 0.5
"""Pause before the second attempt; each further one is twice as long."""

READ_TIMEOUT_SECONDS = 60.0
"""A web server that sends nothing for so long is asked again."""

FETCH_BYTES = 2**24
"""Piece of a file that is fetched at once into the cache."""

IDENTITY_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "generation",
    "Last-Modified",
    "LastModified",
    "mtime",
    "blob_id",
    "oid",
)
"""What file systems call the mark that changes with a file's content; the first that is there is used."""

T = TypeVar("T")


class ShortReadError(OSError):
    """A server gave other bytes than asked for, or another number of them."""


def is_remote(path: str) -> bool:
    """Whether a path names a file over a protocol (`https://`, `s3://`, `gs://`, `hf://`, ...)."""
    return "://" in path


def _filesystem(path: str) -> tuple[Any, str]:
    """The file system of a path, made anew after a fork, and the path in its words."""
    import fsspec

    try:
        filesystem, inner = fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise DataError(f"{path}: cannot be read here ({error}); pip install olmo-hf[remote]") from error
    return filesystem, inner


def _may_pass(error: Exception) -> bool:
    """Whether trying again can help."""
    if isinstance(error, (FileNotFoundError, PermissionError, IsADirectoryError)):
        return False
    # HTTP libraries tell the status; of the refusals only "too many requests" and "timeout" are worth waiting for.
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in (408, 429)
    return isinstance(error, (OSError, TimeoutError)) or type(error).__module__.partition(".")[0] in (
        "aiohttp",
        "botocore",
        "gcsfs",
        "httpx",
        "huggingface_hub",
    )


def _is_refused_as_changed(error: Exception) -> bool:
    """Whether a server says that a file is no longer the one it was (HTTP status 412)."""
    if getattr(error, "status", None) == 412:
        return True
    # s3fs turns every answer of the service into an OSError and keeps the original as its cause.
    answer = getattr(error.__cause__, "response", None)
    return isinstance(answer, dict) and answer.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412


def _patiently(path: str, what: str, attempt: Callable[[], T]) -> T:
    """Runs `attempt` until it works or cannot.

    Raises:
        DataError: It failed for good, or too often.
    """
    pause_seconds = FIRST_PAUSE_SECONDS
    for number in range(1, MAX_ATTEMPTS + 1):
        try:
            return attempt()
        except DataError:
            raise
        except Exception as error:
            if _is_refused_as_changed(error):
                raise DataError(f"{path}: was changed while in use. Restore it and start again") from error
            if not _may_pass(error) or number == MAX_ATTEMPTS:
                times = f" in {number} attempts" if number > 1 else ""
                said = str(error) or type(error).__name__
                raise DataError(
                    f"{path}: {what} cannot be read{times} ({said}); check the address, your rights there and the "
                    "connection"
                ) from error
            logger.warning("%s: %s: %s; trying again in %.1f s", path, what, error or type(error), pause_seconds)
            time.sleep(pause_seconds)
            pause_seconds *= 2
    raise AssertionError("the last attempt returns or raises")


def describe_remote(path: str) -> tuple[int, str]:
    """Size in bytes, and a mark that changes when the content does ("" where the protocol has none).

    Raises:
        DataError: The file is missing or its size is not told.
    """

    def attempt() -> dict[str, Any]:
        filesystem, inner = _filesystem(path)
        # A listing may be remembered from before the file changed.
        filesystem.invalidate_cache()
        return dict(filesystem.info(inner))

    info = _patiently(path, "size", attempt)
    if info.get("size") is None:
        raise DataError(
            f"{path}: the server does not tell its size, so it cannot be read in pieces; copy it here first"
        )
    identity = next((str(info[key]) for key in IDENTITY_KEYS if info.get(key)), "")
    return int(info["size"]), identity


def read_remote(path: str, first_byte: int, num_bytes: int, identity: str = "") -> bytes:
    """Exactly `num_bytes` bytes of a file.

    Args:
        path: The file.
        first_byte: Where they begin.
        num_bytes: How many.
        identity: The mark `describe_remote` gave; over HTTP and S3 the server itself then refuses a changed file.

    Raises:
        DataError: They cannot be had.
    """

    if not num_bytes:
        return b""

    def attempt() -> bytes:
        content = _stretch(path, first_byte, first_byte + num_bytes, identity)
        if len(content) > num_bytes:
            raise DataError(
                f"{path}: the server sends the whole file ({len(content):,} bytes), not the {num_bytes:,} asked for; "
                "it cannot serve pieces, so copy the file here first"
            )
        if len(content) != num_bytes:
            raise ShortReadError(f"{len(content):,} of {num_bytes:,} bytes came")
        return content

    return _patiently(path, f"bytes {first_byte:,} to {first_byte + num_bytes:,}", attempt)


def refuses_changed(path: str, identity: str) -> bool:
    """Whether the server itself compares the mark of a file with every read."""
    return identity.startswith('"') and path.startswith(("http://", "https://", "s3://", "s3a://"))


def _stretch(path: str, first_byte: int, behind: int, identity: str) -> bytes:
    """One attempt at the bytes `[first_byte, behind)`, on condition that the file is the one it was."""
    from fsspec.asyn import sync

    filesystem, inner = _filesystem(path)
    condition = identity if refuses_changed(path, identity) else None
    if path.startswith(("http://", "https://")):
        return bytes(sync(filesystem.loop, _http_stretch, filesystem, inner, first_byte, behind, condition))
    if condition is not None:
        return bytes(sync(filesystem.loop, _s3_stretch, filesystem, inner, first_byte, behind, condition))
    # A file system that is not asynchronous opens the file, and would read megabytes ahead for every instance.
    options: dict[str, Any] = {} if getattr(filesystem, "async_impl", False) else {"cache_type": "none"}
    content: bytes = filesystem.cat_file(inner, start=first_byte, end=behind, **options)
    return content


async def _http_stretch(filesystem: Any, url: str, first_byte: int, behind: int, condition: str | None) -> bytes:
    """Bytes `[first_byte, behind)` over HTTP. Unlike `cat_file` it looks at what the server says that it sends."""
    import aiohttp

    options = dict(filesystem.kwargs)
    options.setdefault(
        "timeout", aiohttp.ClientTimeout(total=None, sock_connect=READ_TIMEOUT_SECONDS, sock_read=READ_TIMEOUT_SECONDS)
    )
    headers = {
        **options.pop("headers", {}),
        # Compressed on the way, a stretch would be one of other bytes.
        "Accept-Encoding": "identity",
        "Range": f"bytes={first_byte}-{behind - 1}",
        **({} if condition is None else {"If-Match": condition}),
    }
    session = await filesystem.set_session()
    async with session.get(filesystem.encode_url(url), headers=headers, **options) as answer:
        filesystem._raise_not_found_for_status(answer, url)
        content = bytes(await answer.read())
        sent, mark = answer.headers.get("Content-Range"), answer.headers.get("ETag", condition)
    if condition is not None and mark != condition:
        # It does not know If-Match.
        raise DataError(f"{url}: was changed while in use. Restore it and start again")
    if sent is not None and not sent.replace("bytes=", "bytes ").startswith(f"bytes {first_byte}-"):
        raise ShortReadError(f"the server sends {sent}, asked for bytes {first_byte}-{behind - 1}")
    return content


async def _s3_stretch(filesystem: Any, inner: str, first_byte: int, behind: int, condition: str) -> bytes:
    """Bytes `[first_byte, behind)` of an S3 object; `cat_file` cannot be told a condition."""
    bucket, key, version = filesystem.split_path(inner)
    answer = await filesystem._call_s3(
        "get_object",
        Bucket=bucket,
        Key=key,
        Range=f"bytes={first_byte}-{behind - 1}",
        IfMatch=condition,
        **({"VersionId": version} if version else {}),
    )
    async with answer["Body"] as body:
        return bytes(await body.read())


def read_if_there(path: str) -> bytes | None:
    """All of a small file, or None when there is none or it is not shown.

    Raises:
        DataError: The server cannot be asked.
    """

    def attempt() -> bytes | None:
        filesystem, inner = _filesystem(path)
        try:
            return bytes(filesystem.cat_file(inner))
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            return None
        except Exception as error:
            # Some stores answer "forbidden" for what is not there.
            if getattr(error, "status", None) in (401, 403, 404, 410):
                return None
            raise

    return _patiently(path, "the file", attempt)


def sha256_remote(path: str, size_bytes: int, identity: str) -> str:
    """Checksum of a file, read piece by piece.

    Raises:
        DataError: It cannot be read.
    """
    digest = hashlib.sha256()
    for first in range(0, size_bytes, FETCH_BYTES):
        digest.update(read_remote(path, first, min(FETCH_BYTES, size_bytes - first), identity))
    return digest.hexdigest()


def glob_remote(pattern: str) -> list[str]:
    """Files of a remote glob, sorted."""

    def attempt() -> list[str]:
        filesystem, inner = _filesystem(pattern)
        return sorted(str(filesystem.unstrip_protocol(found)) for found in filesystem.glob(inner))

    return _patiently(pattern, "the list of files", attempt)


def fetch(path: str, cache_dir: str) -> str:
    """Copies a remote file whole into a local directory, once, and says where it is.

    Of many processes one copies and the others wait. The copy's name contains the mark of the content, so a changed
    file is another copy. A copy that was cut off is continued.

    Raises:
        DataError: The file cannot be read, or the directory not written.
    """
    size_bytes, identity = describe_remote(path)
    key = hashlib.sha256(f"{path}\n{size_bytes}\n{identity}".encode()).hexdigest()[:16]
    target = Path(cache_dir) / f"{key}-{path.rstrip('/').rpartition('/')[2].partition('?')[0]}"
    try:
        if target.is_file() and target.stat().st_size == size_bytes:
            return str(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f".{target.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                _copy(path, target, size_bytes, identity)
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written ({error.strerror or error}); set data.cache_dir to a local directory with "
            f"{size_bytes:,} free bytes"
        ) from error
    return str(target)


def _copy(path: str, target: Path, size_bytes: int, identity: str) -> None:
    hidden = target.with_name(f".{target.name}.part")
    with open(hidden, "ab") as stream:
        while (have := stream.tell()) < size_bytes:
            stream.write(read_remote(path, have, min(FETCH_BYTES, size_bytes - have), identity))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(hidden, target)
