"""The manifest beside a token file, on this machine or elsewhere."""

import contextlib
import os
import posixpath
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from olmo_hf.data.manifest import FORMAT, MANIFEST_NAME, Manifest, ManifestFile, parse_manifest, read_manifest
from olmo_hf.data.remote import is_remote, read_if_there

REMEMBERED_SECONDS = 300
"""How long the answer of a server about a manifest is believed."""

CONNECTIONS = 32
"""Remote folders asked at the same time."""


def manifest_beside(path: str) -> Manifest | None:
    """The manifest in the folder of a token file, or None when there is none.

    Raises:
        DataError: There is one, but it cannot be understood or reached.
    """
    folder = _folder(path)
    if folder is None:
        return None
    if is_remote(path):
        return _remote_manifest(folder, int(time.monotonic() // REMEMBERED_SECONDS))
    try:
        status = os.stat(os.path.join(folder, MANIFEST_NAME))
    except OSError:
        return None
    return _local_manifest(folder, status.st_mtime_ns, status.st_size)


def recorded(path: str) -> ManifestFile | None:
    """What the manifest beside a file says of it."""
    manifest = manifest_beside(path)
    return None if manifest is None else manifest.file(path.rpartition("/")[2])


def tokenizer_beside(path: str) -> str | None:
    """Folder of the tokenizer that a file's tokens were made with; None when no manifest says it."""
    manifest = manifest_beside(path)
    if manifest is None:
        return None
    if not is_remote(path):
        return os.path.join(os.path.dirname(path), manifest.tokenizer)
    protocol, _, inner = path.partition("://")
    return f"{protocol}://{posixpath.normpath(posixpath.join(posixpath.dirname(inner), manifest.tokenizer))}"


def ask_ahead(paths: Iterable[str]) -> None:
    """Asks for the manifests of many remote files, many folders at a time; `manifest_beside` then knows them.

    What goes wrong is left to whoever asks for the manifest itself.
    """
    folders = {folder: path for path in paths if is_remote(path) and (folder := _folder(path)) is not None}
    if len(folders) < 2:
        return

    def attempt(path: str) -> None:
        with contextlib.suppress(Exception):
            manifest_beside(path)

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(attempt, folders.values()))


def _folder(path: str) -> str | None:
    """Folder of a file; None for an address with a query: what is signed is one file, not what lies beside it."""
    if not is_remote(path):
        return os.path.dirname(path) or "."
    if path.startswith(("http://", "https://")) and "?" in path:
        return None
    return path.rpartition("/")[0]


@lru_cache(maxsize=64)
def _local_manifest(folder: str, mtime_ns: int, size_bytes: int) -> Manifest | None:
    """A folder's manifest, read once as long as it does not change: thousands of files share one."""
    return read_manifest(folder)


@lru_cache(maxsize=4096)
def _remote_manifest(folder: str, period: int) -> Manifest | None:
    """A remote folder's manifest, asked for once in a period."""
    path = f"{folder}/{MANIFEST_NAME}"
    content = read_if_there(path)
    # Some servers answer a page of their own where there is nothing.
    if content is None or FORMAT.encode() not in content:
        return None
    return parse_manifest(content.decode("utf-8", "replace"), path)
