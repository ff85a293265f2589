"""Lists of files from paths and globs, here and elsewhere."""

import glob
import os
from collections.abc import Iterable, Iterator

from olmo_hf.data.remote import glob_remote, is_remote
from olmo_hf.errors import DataError

GLOB_CHARACTERS = "*?["


def expand_paths(patterns: Iterable[str]) -> list[str]:
    """Files named by paths and globs: patterns in their order, the matches of each sorted, repetitions kept.

    Raises:
        DataError: A glob matches nothing, or a path is a directory. A plain path that does not exist is left to
            whoever opens it.
    """
    paths: list[str] = []
    for pattern in patterns:
        if not is_remote(pattern) and os.path.isdir(pattern):
            raise DataError(f"{pattern}: is a directory, expected token files; write {pattern.rstrip('/')}/*.npy")
        if not any(c in pattern for c in GLOB_CHARACTERS) or _is_literal(pattern):
            paths.append(pattern)
            continue
        matches = glob_remote(pattern) if is_remote(pattern) else _local_files(pattern)
        if not matches:
            where = "" if is_remote(pattern) else f" (looked from {os.getcwd()})"
            raise DataError(f"{pattern}: matches no file{where}; correct data.paths or prepare the data")
        paths.extend(matches)
    return paths


def _is_literal(pattern: str) -> bool:
    """Whether glob characters are meant literally: a file's own name has them, or they begin a URL's query."""
    if pattern.startswith(("http://", "https://")):
        return not any(c in pattern.partition("?")[0] for c in GLOB_CHARACTERS)
    return not is_remote(pattern) and os.path.exists(pattern)


def _local_files(pattern: str) -> list[str]:
    return sorted({path for path in _matches(pattern) if os.path.isfile(path)})


def _matches(pattern: str) -> Iterator[str]:
    """Identical to `glob.iglob` except that `**` goes through a linked folder, but never in a circle.

    The circle of a link to a folder above it would give every file forty times, as if it were to be repeated.
    """
    if pattern.endswith("/**") or pattern == "**":
        pattern = f"{pattern}/*"
    head, stars, rest = pattern.partition("**/")
    if not stars or (head and not head.endswith("/")):
        yield from glob.iglob(pattern)
        return
    for base in glob.iglob(head) if head else [""]:
        for folder in _folders_below(base, frozenset()):
            yield from _matches(os.path.join(glob.escape(folder), rest))


def _folders_below(folder: str, above: frozenset[str]) -> Iterator[str]:
    """A folder and all below it but the hidden ones."""
    real = os.path.realpath(folder or ".")
    if real in above:
        return
    yield folder
    try:
        names = sorted(os.listdir(folder or "."))
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        if not name.startswith(".") and os.path.isdir(path):
            yield from _folders_below(path, above | {real})
