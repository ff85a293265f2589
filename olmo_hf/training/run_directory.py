"""The run directory at launch: who may use it, what is continued, and what is refused before anything is touched."""

import contextlib
import datetime
import json
import logging
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml

from olmo_hf.distributed import (
    broadcast_object,
    gather_objects,
    is_distributed,
    is_main_process,
    run_on_all,
    world_size,
)
from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit
from olmo_hf.training.disk import Disk, find_disk
from olmo_hf.training.rotation import clean_leftovers
from olmo_hf.training.run_lock import run_lock
from olmo_hf.training.settling import sync_file
from olmo_hf.training.state import RunState, compare_identity, load_run_state
from olmo_hf.training.upload import DOWNLOADED, fetch_source, fetch_unless_damaged, is_remote, newest_copy

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

CONFIG_FILE, LAUNCHES_FILE = "config.yaml", "launches.jsonl"
OWN_FILES = (CONFIG_FILE, LAUNCHES_FILE, "metrics.jsonl", ".lock")


@dataclass(frozen=True)
class OpenedRun:
    """A run directory that is ours for the length of this launch."""

    directory: Path
    checkpoint: Path | None
    """What this launch continues from; None starts afresh."""

    state: RunState
    """Where that checkpoint stands; zeros for a fresh start."""

    from_own: bool
    """Whether the checkpoint is this run's own. Resets and fast-forwards were done by an earlier launch then."""

    disk: Disk
    """Who else sees the same directory."""


@contextlib.contextmanager
def open_run(
    directory: Path,
    *,
    resume: str,
    name: str,
    dry_run: bool = False,
    upload_to: str | None = None,
    verify_first: bool = False,
) -> Iterator[OpenedRun]:
    """Lock the run directory, remove leftovers of dead saves and find what to continue from. All ranks enter.

    A run's own newest whole checkpoint always wins over a path in `resume`, so that a restarted job never repeats the
    reset with which it began. Where machines have disks of their own, it is the newest that is whole on all of them.

    Args:
        directory: the run directory; made when missing.
        resume: `auto`, `never`, or the path or address of a checkpoint.
        name: the run's name; a directory that holds a run of another name is refused.
        dry_run: only look; nothing is locked, cleaned, fetched or written.
        upload_to: address at which copies of this run's checkpoints lie; a newer one than here is fetched.
        verify_first: whether the large files are compared with the manifest too; otherwise whoever restores the
            checkpoint compares them while it reads them, and damage shows then.

    Raises:
        CheckpointError: on all ranks: the directory is in use, not writable, holds another run or other things, or
            there is nothing to resume from.
    """
    with contextlib.ExitStack() as stack:
        _on_all(lambda: _refuse_strangers(directory, name))
        disk = find_disk(directory) if is_distributed() and not dry_run else Disk(is_writer=is_main_process())

        def claim() -> None:
            if disk.is_writer and not dry_run:
                stack.enter_context(run_lock(directory))
                _try_to_write(directory)
                clean_leftovers(directory)

        _on_all(claim)
        find = {"tensors": verify_first or dry_run}
        own = _newest_own(directory, disk, writable=not dry_run, upload_to=upload_to, **find)
        checkpoint = own if own is not None and resume != "never" else _foreign(directory, disk, resume, **find)
        if own is not None and disk.is_writer and not dry_run:
            commit.point_latest_to(own)  # a damaged newer one may have been passed over
        state = _on_all(lambda: load_run_state(checkpoint) if checkpoint is not None else RunState())
        yield OpenedRun(directory, checkpoint, state, own is not None, disk)


def _on_all(action: Callable[[], Value]) -> Value:
    return run_on_all(action, lambda messages: CheckpointError("; ".join(messages)))


def _refuse_strangers(directory: Path, name: str) -> None:
    """A directory may be missing, empty, or hold this very run."""
    there = next((path for path in (directory, *directory.absolute().parents) if path.exists()), directory)
    if not there.is_dir():
        raise CheckpointError(f"{there}: is a file; set training.output_dir to a directory")
    if there != directory:
        return
    config = directory / CONFIG_FILE
    if config.is_file():
        written_for = _name_in(config)
        if written_for is None:
            raise CheckpointError(
                f"{config}: does not say which run this is; if it is this one, write `name: {name}` into it, "
                "otherwise set training.output_dir to another directory"
            )
        if written_for != name:
            raise CheckpointError(
                f"{directory}: holds the run {written_for!r}, not {name!r}; set training.output_dir to another "
                "directory, or name this run like the one to continue"
            )
        return
    strangers = [path.name for path in directory.iterdir() if not _is_ours(path)]
    if strangers and commit.list_checkpoints(directory):
        raise CheckpointError(
            f"{directory}: holds checkpoints, but no {CONFIG_FILE} that says of which run; if it is this one, write "
            f"`name: {name}` into {config}, otherwise set training.output_dir to another directory"
        )
    if strangers:
        raise CheckpointError(
            f"{directory}: is not empty ({', '.join(sorted(strangers)[:3])}) and holds no run; set "
            "training.output_dir to an empty or a new directory"
        )


def _is_ours(path: Path) -> bool:
    """Whether a launch may have left this before it wrote its settings: it locks and fetches checkpoints first."""
    fetched = bool(commit.CHECKPOINT_NAME.fullmatch(path.name)) and (path / commit.MANIFEST).is_file()
    return path.name in (*OWN_FILES, commit.LATEST) or path.name.startswith(commit.STAGING_PREFIX) or fetched


def _name_in(config: Path) -> str | None:
    for line in config.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("name:"):
            return line.removeprefix("name:").strip().strip("'\"")
    return None


def _try_to_write(directory: Path) -> None:
    probe = directory / f"{commit.STAGING_PREFIX}probe"
    try:
        probe.write_bytes(b"0")
        sync_file(probe)
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot write here ({error.strerror}); free some space, or set training.output_dir to a "
            "directory you may write"
        ) from error


def _newest_own(directory: Path, disk: Disk, *, writable: bool, upload_to: str | None, tensors: bool) -> Path | None:
    """This run's newest checkpoint that is whole on every disk; fetched if a newer copy lies elsewhere."""
    passed_over: list[str] = []

    def newest(up_to_step: int | None) -> int | None:
        if not disk.is_writer:
            return None
        found, reasons = commit.newest_whole(directory, up_to_step=up_to_step, tensors=tensors)
        passed_over.extend(reasons)
        return commit.step_of(found) if found is not None else None

    step: int | None = None
    while True:  # once where all see the same files
        bound = step
        answers = gather_objects((disk.is_writer, _on_all(lambda bound=bound: newest(bound))))  # type: ignore[misc]
        steps = [found for is_writer, found in answers if is_writer]
        present = [found for found in steps if found is not None]
        step = min(present) if present else None
        if len(set(steps)) == 1 or len(present) < len(steps):
            break
    for reason in dict.fromkeys(passed_over):
        logger.warning("passed over: %s", reason)
    fetched = _fetch_newer(directory, disk, step if None not in steps else None, upload_to) if writable else None
    if fetched is not None:
        return fetched
    lacking = len(steps) - len(present)
    reasons = [reason for part in gather_objects(passed_over) for reason in part]
    if present and lacking:
        raise CheckpointError(
            f"{directory}: {lacking} of {len(steps)} machines hold no whole checkpoint of this run ({reasons}); copy "
            "the directory there, or set training.upload_to so that it can be fetched"
        )
    if step is None and reasons:
        raise CheckpointError(
            f"{directory}: none of its checkpoints is whole ({'; '.join(reasons)}); remove them to start afresh, or "
            "move the directory away"
        )
    return commit.checkpoint_path(directory, step) if step is not None else None


def _fetch_newer(directory: Path, disk: Disk, step: int | None, upload_to: str | None) -> Path | None:
    """Bring the newest whole copy here, if it is newer than `step`; damaged ones are named and passed over."""
    if upload_to is None:
        return None
    elsewhere: int | None = None

    def look() -> int | None:
        return newest_copy(upload_to, before_step=elsewhere) if is_main_process() else None

    def bring() -> str:
        return (
            fetch_unless_damaged(upload_to, elsewhere, directory) if disk.is_writer and elsewhere is not None else ""
        )

    damages: list[str] = []
    while (elsewhere := broadcast_object(_on_all(look))) is not None and (step is None or elsewhere > step):
        logger.info("fetching checkpoint-%d from %s", elsewhere, upload_to)
        damages = [damage for damage in gather_objects(_on_all(bring)) if damage]
        if not damages:
            return commit.checkpoint_path(directory, elsewhere)
        logger.warning("passed over: %s", damages[0])
    if damages and step is None:
        raise CheckpointError(
            f"{upload_to}: none of the copies there is whole ({damages[0]}); remove them, or set training.upload_to "
            "to another place"
        )
    return None


def _foreign(directory: Path, disk: Disk, resume: str, *, tensors: bool) -> Path | None:
    """The checkpoint that `resume` names, when the run has none of its own."""
    if resume == "never" and any(gather_objects(bool(commit.list_checkpoints(directory)))):
        raise CheckpointError(
            f"{directory}: holds checkpoints of an earlier launch and training.resume is never; set it to auto to go "
            "on, or choose another name"
        )
    if resume in ("auto", "never"):
        return None
    if is_remote(resume):
        step = broadcast_object(
            _on_all(lambda: commit.step_of(fetch_source(resume, directory)) if disk.is_writer else -1)
        )
        return commit.checkpoint_path(directory / DOWNLOADED, step)
    found = _on_all(lambda: str(_named(resume, tensors=tensors)) if disk.is_writer else "")
    return Path(broadcast_object(found))


def _named(resume: str, *, tensors: bool) -> Path:
    source = Path(resume)
    if not source.is_dir():
        raise CheckpointError(
            f"training.resume is {resume!r}: no such directory; expected auto, never, a checkpoint or its address"
        )
    if not (source / commit.MANIFEST).is_file() and commit.list_checkpoints(source):
        found, passed_over = commit.newest_whole(source, tensors=tensors)
        for reason in passed_over:
            logger.warning("passed over: %s", reason)
        if found is None:
            raise CheckpointError(
                f"training.resume is {resume!r}: none of the checkpoints there is whole and has an optimizer; name "
                "another"
            )
        return found.resolve()
    commit.require_whole(source, tensors=tensors)
    return source.resolve()


def record_launch(opened: OpenedRun, *, config_yaml: str, step: int) -> None:
    """Write the resolved settings and a line about this launch: when, from which step, with what, what is new."""
    if not opened.disk.is_writer:
        return
    directory = opened.directory
    changed = changed_settings(directory, config_yaml)
    for change in changed:
        logger.info("changed since the last launch: %s", change)
    staged = directory / f"{commit.STAGING_PREFIX}{CONFIG_FILE}"
    staged.write_text(config_yaml, encoding="utf-8")
    staged.replace(directory / CONFIG_FILE)
    line: dict[str, Any] = {
        # To the microsecond: two launches can fall into one second.
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        "step": step,
        "world_size": world_size(),
        "host": platform.node(),
        "versions": {p: version(p) for p in ("torch", "transformers", "accelerate", "numpy")},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "changed": changed,
        "config": config_yaml,
    }
    with open(directory / LAUNCHES_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def changed_settings(directory: Path, config_yaml: str) -> list[str]:
    """What differs between the settings of the last launch and these, one sentence for each."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return []
    try:
        before, now = yaml.safe_load(path.read_text(encoding="utf-8")), yaml.safe_load(config_yaml)
        return compare_identity(before, now)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        return [f"{path} is not readable ({error}), so what changed is unknown"]
