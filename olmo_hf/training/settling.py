"""Files on their way to the disk: synced, with size and checksum."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

BLOCK_BYTES = 1 << 20
"""Read at once for a checksum: what fits into the processor's own memory is not fetched twice."""


def sync_file(path: Path) -> None:
    """Force a file's or directory's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """XXH3 (128 bit) of a file, in hexadecimal."""
    digest, memory = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(memory):
            digest.update(memory[:count])
    return digest.hexdigest()


def describe_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Sync the named files of `directory` and return their sizes and checksums."""
    with SettlingFiles(directory) as files:
        return files.describe(names)


class SettlingFiles:
    """Files of a directory on their way to the disk, while others are still being written.

    Checksums are worked out while the disk writes: both read what lies in memory still.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._disk, self._sums = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._begun: dict[str, tuple[Future[None], Future[str]]] = {}

    def __enter__(self) -> "SettlingFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._disk, self._sums):
            threads.shutdown(cancel_futures=True)

    def begin(self, *paths: Path) -> None:
        """Files that are complete: sync them and work out their checksums from now on."""
        for path in paths:
            name = str(path.relative_to(self._directory))
            if name not in self._begun:
                self._begun[name] = self._disk.submit(sync_file, path), self._sums.submit(checksum, path)

    def describe(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """Size and checksum of the named files, once they are on disk.

        Raises:
            OSError: one of them could not be written.
        """
        self.begin(*(self._directory / name for name in names))
        described = {}
        for name in names:
            synced, checked = self._begun[name]
            synced.result()
            described[name] = {"size": (self._directory / name).stat().st_size, "xxh3_128": checked.result()}
        return described
