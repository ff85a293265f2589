"""A checkpoint is whole or absent: staging, sync, manifest, rename, verification, rotation.

A checkpoint is written under a hidden name in the run directory. When every file is on disk the manifest, which
lists each file with size and checksum, is written last; then the directory is renamed to `checkpoint-N`. Whatever
is killed in between leaves only a hidden directory, which the next start removes.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import xxhash

from olmo_hf.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest"
STAGING_PREFIX, REPLACED_PREFIX, TRASH_PREFIX = ".staging-", ".replaced-", ".trash-"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")

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
    created: str = ""
    format: int = 1


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Directory of the checkpoint of `step`."""
    return run_dir / f"checkpoint-{step}"


def staging_path(run_dir: Path, step: int) -> Path:
    """Hidden directory in which the checkpoint of `step` is written."""
    return run_dir / f"{STAGING_PREFIX}checkpoint-{step}"


def sync_file(path: Path) -> None:
    """Force a file's or directory's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """XXH3 (128 bit) of a file, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def describe_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Sync the named files of `directory` and return their sizes and checksums."""
    described = {}
    for name in names:
        path = directory / name
        sync_file(path)
        described[name] = {"size": path.stat().st_size, "xxh3_128": checksum(path)}
    return described


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON (no NaN) and sync it."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, allow_nan=False, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def commit(staging: Path, final: Path, manifest: Manifest) -> None:
    """Turn a finished staging directory into a checkpoint. Called by one process, after all have written."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_json(staging / MANIFEST, dataclasses.asdict(dataclasses.replace(manifest, created=created)))
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
        os.symlink(checkpoint.name, new_link)
        os.replace(new_link, link)
    except OSError as error:  # a file system without links still trains; the newest checkpoint is found by number
        logger.warning("cannot set the link %s: %s", link, error)


def remove_tree(path: Path) -> bool:
    """Delete a directory so that a kill in the middle never leaves half a checkpoint. Returns whether it is gone.

    A directory that cannot be removed is named in a warning; training goes on and the next rotation tries again.
    """
    if not path.exists():
        return True
    trash = path.parent / f"{TRASH_PREFIX}{path.name.lstrip('.')}"
    try:
        if path != trash:
            if trash.exists():
                shutil.rmtree(trash)
            os.replace(path, trash)
        shutil.rmtree(trash)
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error)
        return False
    return True


def read_manifest(checkpoint: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing or not readable as one.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
        sizes_ok = all(isinstance(entry["size"], int) for entry in manifest.files.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST} is missing or unreadable ({error})") from error
    if not sizes_ok or not isinstance(manifest.step, int):
        raise CheckpointError(f"{checkpoint}: {MANIFEST} does not list sizes and a step as numbers")
    return manifest


def verify(checkpoint: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: a file is missing, cut short or changed; the message names it.
    """
    manifest = read_manifest(checkpoint)
    for name, entry in manifest.files.items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"{checkpoint}: {name} is missing")
        if path.stat().st_size != entry["size"]:
            raise CheckpointError(f"{checkpoint}: {name} has {path.stat().st_size} bytes instead of {entry['size']}")
        if checksum(path) != entry["xxh3_128"]:
            raise CheckpointError(f"{checkpoint}: {name} is damaged (checksum differs from {MANIFEST})")
    return manifest


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Checkpoint directories of a run, newest step first; a stray file of that name does not count."""
    found = []
    if run_dir.is_dir():
        for path in run_dir.iterdir():
            match = CHECKPOINT_NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def newest_whole(run_dir: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and why newer ones were passed over."""
    passed_over = []
    for path in list_checkpoints(run_dir):
        try:
            verify(path)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return path, passed_over
    return None, passed_over


def clean_leftovers(run_dir: Path) -> None:
    """Remove what dead saves and rotations left. Only while no other process works in the directory."""
    if not run_dir.is_dir():
        return
    for path in run_dir.glob(f"{REPLACED_PREFIX}*"):
        final = run_dir / path.name.removeprefix(REPLACED_PREFIX)
        if not final.exists():  # killed between the two renames: the old one is still the whole one
            os.replace(path, final)
    for prefix in (STAGING_PREFIX, TRASH_PREFIX, REPLACED_PREFIX):
        for path in run_dir.glob(f"{prefix}*"):
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                remove_tree(path)


def rotate(run_dir: Path, *, newest: Path, keep: int) -> None:
    """Delete what is no longer kept, by step number, after `newest` is on disk.

    Ephemeral checkpoints go as soon as anything newer has landed; of the permanent ones the `keep` newest stay
    (all when `keep` is -1). Directories without a readable manifest are left alone.
    """
    permanent = []
    for path in list_checkpoints(run_dir):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if manifest.kind == "ephemeral":
            if path != newest:
                remove_tree(path)
        else:
            permanent.append(path)
    if keep > 0:
        for path in permanent[keep:]:
            if path != newest:
                remove_tree(path)


def require_space(run_dir: Path, needed_bytes: int) -> None:
    """Refuse to start a save that cannot fit.

    Raises:
        CheckpointError: with needed and free bytes.
    """
    free_bytes = shutil.disk_usage(run_dir).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"{run_dir}: a checkpoint needs {needed_bytes:,} bytes but only {free_bytes:,} are free; "
            "free some space or set training.output_dir to a larger disk"
        )


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for this process; the system lets go of it however the process ends.

    Raises:
        CheckpointError: another process trains in this directory, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / ".lock", "a+", encoding="utf-8")  # noqa: SIM115  (entered below)
    except OSError as error:
        raise CheckpointError(
            f"{run_dir}: cannot write here ({error.strerror}); set training.output_dir to a directory you may write"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise CheckpointError(
                f"{run_dir}: {owner} is training here already; wait for it, stop it, or choose another name"
            ) from None
        except OSError as error:  # a file system without locks: say so, and trust the user
            logger.warning("cannot lock %s: %s", run_dir, error)
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()
        yield
