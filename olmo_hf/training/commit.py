"""A checkpoint is whole or absent: staging, sync, manifest, rename, verification, rotation.

A checkpoint is written under a hidden name in the run directory. When every file is on disk the manifest, which
lists each file with size and checksum, is written last; then the directory is renamed to `checkpoint-N`. Whatever
is killed in between leaves only a hidden directory, which the next start removes.
"""

import dataclasses
import datetime
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import xxhash

from olmo_hf.errors import CheckpointError
from olmo_hf.training.settling import checksum, sync_file

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest"
STAGING_PREFIX, REPLACED_PREFIX, TRASH_PREFIX = ".staging-", ".replaced-", ".trash-"
TENSOR_FILES = (".safetensors", ".distcp")
"""Endings of the large files."""

READERS = 8
"""Threads that read a checkpoint to verify it."""

CHECKPOINT_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)")

Kind = Literal["unsharded", "sharded", "ephemeral"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    kind: Kind
    step: int
    tokens: int
    world_size: int
    files: dict[str, dict[str, Any]]
    """Path inside the checkpoint -> `size` in bytes and `xxh3_128` in hexadecimal."""

    versions: dict[str, str]
    optimizer: bool = True
    """Whether a run can go on from it."""

    created: str = ""
    format: int = 1
    xxh3_128: str = ""
    """Checksum of all the other fields; empty: unknown."""

    def own_checksum(self) -> str:
        """Checksum of all fields but itself, in hexadecimal."""
        fields = dataclasses.asdict(dataclasses.replace(self, xxh3_128=""))
        return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Directory of the checkpoint of `step`."""
    return run_dir / f"checkpoint-{step}"


def staging_path(run_dir: Path, step: int) -> Path:
    """Hidden directory in which the checkpoint of `step` is written."""
    return run_dir / f"{STAGING_PREFIX}checkpoint-{step}"


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON (no NaN) and sync it."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, with the time and its own checksum."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    dated = dataclasses.replace(manifest, created=created)
    signed = dataclasses.replace(dated, xxh3_128=dated.own_checksum())
    write_json(directory / MANIFEST, dataclasses.asdict(signed))


def commit(staging: Path, final: Path, manifest: Manifest) -> None:
    """Turn a finished staging directory into a checkpoint. Called by one process, after all have written."""
    write_manifest(staging, manifest)
    for directory in sorted({(staging / name).parent for name in manifest.files} | {staging}):
        sync_file(directory)
    if final.exists():
        replaced = final.parent / f"{REPLACED_PREFIX}{final.name}"
        remove_tree(replaced)
        os.replace(final, replaced)
        os.replace(staging, final)
        remove_tree(replaced)
    else:
        os.replace(staging, final)
    sync_file(final.parent)
    point_latest_to(final)


def point_latest_to(checkpoint: Path) -> None:
    """Make `latest` name this checkpoint, replacing the old link in one step."""
    link = checkpoint.parent / LATEST
    new_link = checkpoint.parent / f"{STAGING_PREFIX}{LATEST}"
    try:
        new_link.unlink(missing_ok=True)
        if link.is_dir() and not link.is_symlink():  # a copy that followed the link, and would stay as it is for ever
            aside = next(
                path for n in itertools.count(1) if not (path := link.with_name(f"{LATEST}-copy-{n}")).exists()
            )
            link.rename(aside)
            logger.warning("%s was no link but a directory, and is now %s", link, aside.name)
        os.symlink(checkpoint.name, new_link)
        os.replace(new_link, link)
    except OSError as error:  # a file system without links still trains; the newest checkpoint is found by number
        logger.warning("cannot set the link %s: %s", link, error)


def remove_tree(path: Path) -> bool:
    """Delete a directory so that a kill in the middle never leaves half a checkpoint. Returns whether it is gone.

    A directory that cannot be removed is named in a warning; training goes on and the next rotation tries again.
    """
    trash = put_aside(path)
    return delete(trash) if trash is not None else not path.exists()


def put_aside(path: Path) -> Path | None:
    """Rename a directory to what the next start deletes, and return that; None: it is gone, or cannot be renamed."""
    if not path.exists():
        return None
    trash = path.parent / f"{TRASH_PREFIX}{path.name.lstrip('.')}"
    try:
        if path.is_symlink():  # what it points to was put elsewhere by somebody, and is theirs
            path.unlink()
            return None
        if path != trash:
            if trash.exists():
                shutil.rmtree(trash)
            os.replace(path, trash)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)
        return None
    return trash


def delete(trash: Path) -> bool:
    """Delete what was put aside; returns whether it is gone."""
    try:
        shutil.rmtree(trash)
    except OSError as error:
        logger.warning("cannot remove %s: %s", trash, error)
        return False
    return True


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing or not readable as one.
    """
    try:
        text = (checkpoint / MANIFEST).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is missing or unreadable ({error})") from error
    return parse_manifest(text, str(checkpoint))


def parse_manifest(text: str, checkpoint: str) -> Manifest:
    """The manifest from its text.

    Args:
        text: JSON.
        checkpoint: where it comes from, for messages.

    Raises:
        CheckpointError: it is no manifest, or damaged.
    """
    try:
        manifest = Manifest(**json.loads(text))
        well_formed = isinstance(manifest.step, int) and all(
            isinstance(entry["size"], int) and isinstance(entry["xxh3_128"], str) for entry in manifest.files.values()
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is missing or unreadable ({error})") from error
    if stray := [name for name in manifest.files if PurePosixPath(name).is_absolute() or ".." in Path(name).parts]:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} lists {stray[0]!r}, which is not inside the checkpoint")
    if not well_formed:
        raise CheckpointError(
            f"{checkpoint}: {MANIFEST} does not list sizes and a step as numbers, and checksums as text"
        )
    if manifest.xxh3_128 and manifest.xxh3_128 != manifest.own_checksum():
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is damaged (its checksum differs)")
    return manifest


def verify(checkpoint: Path, *, tensors: bool = True) -> Manifest:
    """Check every file of a checkpoint against its manifest.

    Args:
        checkpoint: the directory.
        tensors: False leaves the checksums of the large files to whoever reads them next (`CheckedFiles`).

    Raises:
        CheckpointError: a file is missing, cut short or changed; the message names it.
    """
    manifest = read_manifest(checkpoint)
    if problem := next(problems_of(checkpoint, manifest.files, tensors=tensors), None):
        raise CheckpointError(f"{checkpoint}: {problem}")
    return manifest


def require_whole(checkpoint: Path, *, tensors: bool = True) -> Manifest:
    """Identical to `verify` except that the message says what to do: for a checkpoint that somebody has named."""
    try:
        return verify(checkpoint, tensors=tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; name another checkpoint, or restore this one from a copy") from error


def problems_of(checkpoint: Path, files: dict[str, dict[str, Any]], *, tensors: bool = True) -> Iterator[str]:
    """What is wrong with the files, one sentence each, in their order; `tensors` as in `verify`."""

    def look(name: str) -> str:
        path, entry = checkpoint / name, files[name]
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["size"]:
            return f"{name} has {path.stat().st_size} bytes instead of {entry['size']}"
        if (tensors or not name.endswith(TENSOR_FILES)) and checksum(path) != entry["xxh3_128"]:
            return damage_of(name)
        return ""

    with ThreadPoolExecutor(max_workers=READERS) as readers:
        yield from filter(None, readers.map(look, files))


def damage_of(name: str) -> str:
    """What is said of a file with another checksum than the manifest's."""
    return f"{name} is damaged (checksum differs from {MANIFEST})"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint directories of a run, newest step first; a stray file of that name does not count."""
    found = []
    if run_dir.is_dir():
        for path in run_dir.iterdir():
            match = CHECKPOINT_NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def newest_whole(
    run_dir: Path, *, up_to_step: int | None = None, tensors: bool = True
) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that a run can go on from, and why newer ones were passed over.

    Args:
        run_dir: the run directory.
        up_to_step: only checkpoints of this step or earlier.
        tensors: as in `verify`.
    """
    passed_over = []
    for path in list_checkpoints(run_dir):
        if up_to_step is not None and step_of(path) > up_to_step:
            continue
        try:
            manifest = verify(path, tensors=tensors)
        except CheckpointError as error:
            passed_over.append(str(error))
            continue
        if manifest.step != step_of(path):
            passed_over.append(f"{path}: holds step {manifest.step}; a checkpoint must keep the name it was given")
            continue
        if manifest.optimizer:
            return path, passed_over
        logger.info("%s holds a model only; looking for an older one to go on from", path)
    return None, passed_over


def belongs_to_a_rank(name: str) -> bool:
    """Whether a file of a checkpoint is one rank's own; the others are the same whoever wrote them."""
    return name.startswith("rng_state_") or name.endswith(".distcp")


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("checkpoint-"))
