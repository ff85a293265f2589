"""The run directory at launch: who may use it, what is continued, and what is refused before anything is touched."""

import contextlib
import datetime
import json
import logging
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from olmo_hf.distributed import broadcast_object, is_main_process, run_on_all, world_size
from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit
from olmo_hf.training.state import RunState, load_run_state

logger = logging.getLogger(__name__)

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


@contextlib.contextmanager
def open_run(directory: Path, *, resume: str, name: str, dry_run: bool = False) -> Iterator[OpenedRun]:
    """Lock the run directory, remove leftovers of dead saves and find what to continue from. All ranks enter.

    A run's own newest whole checkpoint always wins over a path in `resume`, so that a restarted job never repeats the
    reset with which it began.

    Args:
        directory: the run directory; made when missing.
        resume: `auto`, `never` or the path of a checkpoint.
        name: the run's name; a directory that holds a run of another name is refused.
        dry_run: only look; nothing is locked, cleaned or written.

    Raises:
        CheckpointError: on all ranks: the directory is in use, not writable, holds another run or other things, or
            there is nothing to resume from.
    """
    with contextlib.ExitStack() as stack:

        def claim() -> tuple[str | None, bool]:
            if not is_main_process():
                return None, False
            _refuse_strangers(directory, name)
            if not dry_run:
                stack.enter_context(commit.run_lock(directory))
                _try_to_write(directory)
                commit.clean_leftovers(directory)
            found, from_own = _choose(directory, resume)
            return (str(found) if found is not None else None), from_own

        found, from_own = broadcast_object(run_on_all(claim, lambda messages: CheckpointError("; ".join(messages))))
        checkpoint = Path(found) if found is not None else None
        state = load_run_state(checkpoint) if checkpoint is not None else RunState()
        yield OpenedRun(directory, checkpoint, state, from_own)


def _refuse_strangers(directory: Path, name: str) -> None:
    """A directory may be missing, empty, or hold this very run."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is a file; set training.output_dir to a directory")
    config = directory / CONFIG_FILE
    if config.is_file():
        written_for = _name_in(config)
        if written_for != name:
            raise CheckpointError(
                f"{directory}: holds the run {written_for!r}, not {name!r}; set training.output_dir to another "
                "directory, or name this run like the one to continue"
            )
        return
    strangers = [p.name for p in directory.iterdir() if p.name not in OWN_FILES and not p.name.startswith(".staging-")]
    if strangers:
        raise CheckpointError(
            f"{directory}: is not empty ({', '.join(sorted(strangers)[:3])}) and holds no run; set "
            "training.output_dir to an empty or a new directory"
        )


def _name_in(config: Path) -> str | None:
    for line in config.read_text(encoding="utf-8").splitlines():
        if line.startswith("name:"):
            return line.removeprefix("name:").strip().strip("'\"")
    return None


def _try_to_write(directory: Path) -> None:
    probe = directory / f"{commit.STAGING_PREFIX}probe"
    try:
        probe.write_bytes(b"0")
        commit.sync_file(probe)
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot write here ({error.strerror}); free some space, or set training.output_dir to a "
            "directory you may write"
        ) from error


def _choose(directory: Path, resume: str) -> tuple[Path | None, bool]:
    newest, passed_over = commit.newest_whole(directory)
    for reason in passed_over:
        logger.warning("passed over: %s", reason)
    if resume == "never":
        if commit.list_checkpoints(directory):
            raise CheckpointError(
                f"{directory}: holds checkpoints of an earlier launch and training.resume is never; set it to auto to "
                "go on, or choose another name"
            )
        return None, False
    if newest is not None:
        return newest, True
    if passed_over:
        raise CheckpointError(
            f"{directory}: none of its checkpoints is whole ({'; '.join(passed_over)}); remove them to start afresh, "
            "or name another checkpoint in training.resume"
        )
    if resume == "auto":
        return None, False
    source = Path(resume)
    if not source.is_dir():
        raise CheckpointError(
            f"training.resume is {resume!r}: no such directory; expected auto, never or a checkpoint"
        )
    if not (source / commit.MANIFEST).is_file() and commit.list_checkpoints(source):
        found, _ = commit.newest_whole(source)
        if found is None:
            raise CheckpointError(f"training.resume is {resume!r}: none of the checkpoints there is whole")
        source = found
    commit.verify(source)
    return source.resolve(), False


def record_launch(directory: Path, *, config_yaml: str, step: int) -> None:
    """Write the resolved settings and a line about this launch: when, from which step, with what, what is new."""
    if not is_main_process():
        return
    changed = changed_settings(directory, config_yaml)
    for change in changed:
        logger.info("changed since the last launch: %s", change)
    staged = directory / f"{commit.STAGING_PREFIX}{CONFIG_FILE}"
    staged.write_text(config_yaml, encoding="utf-8")
    staged.replace(directory / CONFIG_FILE)
    line: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": step,
        "world_size": world_size(),
        "host": platform.node(),
        "versions": {p: version(p) for p in ("torch", "transformers", "accelerate", "numpy")},
        "changed": changed,
    }
    with open(directory / LAUNCHES_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def changed_settings(directory: Path, config_yaml: str) -> list[str]:
    """Lines that differ between the settings of the last launch and these, with `-` and `+` before them."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        return []
    old, new = path.read_text(encoding="utf-8").splitlines(), config_yaml.splitlines()
    return [f"- {line}" for line in old if line not in new] + [f"+ {line}" for line in new if line not in old]
