"""Checkpoints kept elsewhere too: copied to object storage after they are on disk, and fetched from there.

A copy is whole or absent as well: the manifest is put last, and taken away first where a copy is replaced.
"""

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit
from olmo_hf.training.settling import describe_files

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
FIRST_PAUSE_SECONDS = 0.5
"""Pause before the second attempt; each further one is twice as long."""

DOWNLOADED = f"{commit.STAGING_PREFIX}downloaded"
"""Where a checkpoint of another run is put in the run directory; gone at the next start."""

Value = TypeVar("Value")


def is_remote(path: str) -> bool:
    """Whether a path is an address with a protocol (`s3://`, `gs://`, `hf://`, `file://`, ...)."""
    return "://" in path


class Storage:
    """A directory on a file system that fsspec knows, in which checkpoints lie."""

    def __init__(self, url: str):
        import fsspec

        try:
            self.filesystem, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{url}: cannot be reached from here ({error}); pip install olmo-hf[remote], or mend the address"
            ) from error
        self.url = url.rstrip("/")
        self.root = root.rstrip("/")

    def path(self, *names: str) -> str:
        """A path in the file system's own words."""
        return "/".join((self.root, *names))

    def steps(self) -> list[int]:
        """Steps whose checkpoints have a manifest, newest first."""
        self.filesystem.invalidate_cache()
        found = []
        try:
            manifests = self.filesystem.glob(self.path("checkpoint-*", commit.MANIFEST))
        except FileNotFoundError:  # said by the Hub's client where others have an empty list
            return []
        for path in manifests:
            match = commit.CHECKPOINT_NAME.fullmatch(PurePosixPath(path).parent.name)
            if match:
                found.append(int(match[1]))
        return sorted(found, reverse=True)

    def remove(self, name: str) -> None:
        """Take a checkpoint away, its manifest first; one that is not there is no error."""
        manifest = self.path(name, commit.MANIFEST)
        if self.filesystem.exists(manifest):
            self.filesystem.rm_file(manifest)
        if self.filesystem.exists(self.path(name)):
            self.filesystem.rm(self.path(name), recursive=True)


def patiently(action: Callable[[], Value], what: str, stop: threading.Event | None = None) -> Value:
    """The action's result; what fails is tried again with growing pauses.

    Raises:
        CheckpointError: it failed too often.
    """
    pause_seconds = FIRST_PAUSE_SECONDS
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return action()
        except CheckpointError:
            raise
        except Exception as error:
            if attempt == MAX_ATTEMPTS or (stop is not None and stop.is_set()):
                raise CheckpointError(
                    f"{what} failed in {attempt} attempts ({error}); check the address, your rights there and the "
                    "connection"
                ) from error
            logger.warning("%s: %s; trying again in %.1f s", what, error, pause_seconds)
            time.sleep(pause_seconds)
            pause_seconds *= 2
    raise AssertionError("the last attempt returns or raises")


class Uploader:
    """Copies checkpoints in a thread, in the order in which they were written; training never waits for it.

    Ephemeral ones are dropped from the queue when something newer waits behind them, and removed from the storage when
    something newer has arrived there. Permanent ones are never removed there. What cannot be copied is told in a
    warning; it is still on disk.

    Args:
        url: the directory that mirrors the run directory.
        puts_manifest: whether this process puts the manifest; where machines have disks of their own, others only
            put the files that lie on theirs.
        agree: where there are such others: tells them whether all went well here, and returns whether it did
            everywhere. None: this process is the only one.
    """

    def __init__(self, url: str, *, puts_manifest: bool = True, agree: Callable[[bool], bool] | None = None):
        self._storage = Storage(url)
        self._puts_manifest = puts_manifest
        self._agree = agree
        self._queue: queue.Queue[tuple[Path, commit.Manifest] | None] = queue.Queue()
        self._waiting: list[str] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        self._thread.start()

    @property
    def in_use(self) -> tuple[str, ...]:
        """Names of the checkpoints that wait or are being copied; they must not be removed from the disk."""
        with self._lock:
            return tuple(self._waiting)

    def submit(self, checkpoint: Path, manifest: commit.Manifest) -> None:
        """Ask for a copy. Returns at once."""
        with self._lock:
            self._waiting.append(checkpoint.name)
        self._queue.put((checkpoint, manifest))

    def finish(self) -> None:
        """Wait until everything is copied, or was given up."""
        self._queue.put(None)
        self._thread.join()

    def stop(self, *, timeout_seconds: float) -> None:
        """As `finish`, but without new attempts and not for longer than this."""
        self._stopping.set()
        self._queue.put(None)
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            checkpoint, manifest = job
            try:
                if not (manifest.kind == "ephemeral" and self._newer_waits()):
                    self._copy(checkpoint, manifest)
            except CheckpointError as error:
                logger.warning("%s was not copied to %s: %s", checkpoint.name, self._storage.url, error)
            except Exception:
                logger.exception("%s was not copied to %s", checkpoint.name, self._storage.url)
            with self._lock:
                self._waiting.remove(checkpoint.name)

    def _newer_waits(self) -> bool:
        return self._agree is None and len(self.in_use) > 1  # others may see another queue at this moment

    def _copy(self, checkpoint: Path, manifest: commit.Manifest) -> None:
        storage, name = self._storage, checkpoint.name
        if self._puts_manifest:
            self._together(lambda: self._patiently(lambda: storage.remove(name), f"removing an older {name}"))
        else:
            self._together(lambda: None)
        self._together(lambda: self._put_files(checkpoint))
        if not self._puts_manifest:
            return
        whole = checkpoint.parent / f"{commit.STAGING_PREFIX}manifest-{name}"
        whole.mkdir(exist_ok=True)
        commit.write_manifest(whole, manifest)
        self._put(whole / commit.MANIFEST, storage.path(name, commit.MANIFEST))
        shutil.rmtree(whole)
        self._remove_older_ephemeral(manifest)

    def _together(self, action: Callable[[], None]) -> None:
        """Run the action here and learn whether it went well everywhere."""
        failure = None
        try:
            action()
        except Exception as error:
            failure = error
        if not (self._agree(failure is None) if self._agree is not None else failure is None):
            raise CheckpointError(str(failure) if failure is not None else "another machine failed") from failure

    def _put_files(self, checkpoint: Path) -> None:
        for file in commit.read_manifest(checkpoint).files:
            if not self._puts_manifest and not commit.belongs_to_a_rank(file):
                continue  # rank 0 puts its own
            self._put(checkpoint / file, self._storage.path(checkpoint.name, *PurePosixPath(file).parts))

    def _put(self, source: Path, target: str) -> None:
        def attempt() -> None:
            self._storage.filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._storage.filesystem.put_file(str(source), target)
            size = self._storage.filesystem.info(target)["size"]
            if size != source.stat().st_size:
                raise OSError(f"{size} bytes arrived instead of {source.stat().st_size}")

        self._patiently(attempt, f"copying {source.name}")

    def _remove_older_ephemeral(self, newest: commit.Manifest) -> None:
        if not newest.optimizer:
            return
        for step in self._patiently(self._storage.steps, "listing"):
            name = f"checkpoint-{step}"
            if step < newest.step and _remote_manifest(self._storage, step).kind == "ephemeral":
                self._patiently(lambda name=name: self._storage.remove(name), f"removing {name}")  # type: ignore[misc]

    def _patiently(self, action: Callable[[], Value], what: str) -> Value:
        return patiently(action, what, self._stopping)


def _remote_manifest(storage: Storage, step: int) -> commit.Manifest:
    text = storage.filesystem.cat_file(storage.path(f"checkpoint-{step}", commit.MANIFEST))
    return commit.parse_manifest(text.decode("utf-8"), f"{storage.url}/checkpoint-{step}")


def newest_copy(url: str, *, before_step: int | None = None) -> int | None:
    """Step of the newest copy that a run can go on from; None when there is none.

    Args:
        url: the directory in which the copies lie.
        before_step: only copies of earlier steps.
    """
    storage = Storage(url)
    for step in patiently(storage.steps, f"listing {url}"):
        if before_step is not None and step >= before_step:
            continue
        try:
            if patiently(lambda step=step: _remote_manifest(storage, step), f"reading {url}").optimizer:  # type: ignore[misc]
                return step
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
    return None


def fetch(url: str, step: int, run_dir: Path) -> Path:
    """Bring a copy into the run directory, verified, under its own name; returns where it is now.

    Raises:
        CheckpointError: it cannot be read, or what arrived is not what was put.
    """
    if damage := fetch_unless_damaged(url, step, run_dir):
        raise CheckpointError(damage)
    return commit.checkpoint_path(run_dir, step)


def fetch_unless_damaged(url: str, step: int, run_dir: Path) -> str:
    """As `fetch`, but what is wrong with a copy is told, and "" when nothing is.

    Raises:
        CheckpointError: it cannot be reached, which says nothing about the copy.
    """
    storage, name = Storage(url), f"checkpoint-{step}"
    manifest = patiently(lambda: _remote_manifest(storage, step), f"reading {url}/{name}")
    staging, final = commit.staging_path(run_dir, step), commit.checkpoint_path(run_dir, step)
    commit.remove_tree(staging)
    for file in manifest.files:
        target = staging / file
        target.parent.mkdir(parents=True, exist_ok=True)
        source = storage.path(name, *PurePosixPath(file).parts)
        if not _get(storage.filesystem, source, target):
            commit.remove_tree(staging)
            return f"{url}/{name}: {file} is missing"
    describe_files(staging, list(manifest.files))  # on disk before it counts
    commit.write_manifest(staging, manifest)
    try:
        commit.verify(staging)
    except CheckpointError as error:
        commit.remove_tree(staging)
        return f"{url}/{name}, as fetched to {error}"
    commit.commit(staging, final, manifest)
    return ""


def _get(filesystem: Any, source: str, target: Path) -> bool:
    """Read a file from the storage; False when it is not there."""

    def get() -> bool:
        try:
            filesystem.get_file(source, str(target))
        except FileNotFoundError:
            return False
        return True

    return patiently(get, f"fetching {source}")


def fetch_source(url: str, run_dir: Path) -> Path:
    """Bring a checkpoint of another run here: the one at the address, or the newest below it.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    parent, _, last = url.rstrip("/").rpartition("/")
    match = commit.CHECKPOINT_NAME.fullmatch(last)
    if match:
        return fetch(parent, int(match[1]), run_dir / DOWNLOADED)
    damage, step = "", newest_copy(url)
    while step is not None:
        damage = fetch_unless_damaged(url, step, run_dir / DOWNLOADED)
        if not damage:
            return commit.checkpoint_path(run_dir / DOWNLOADED, step)
        logger.warning("passed over: %s", damage)
        step = newest_copy(url, before_step=step)
    raise CheckpointError(
        f"training.resume is {url!r}: no {'whole ' if damage else ''}checkpoint is there; name another"
    )
