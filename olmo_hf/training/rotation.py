"""What becomes of old checkpoints, and of what dead saves left."""

import logging
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from olmo_hf.errors import CheckpointError
from olmo_hf.training.commit import (
    REPLACED_PREFIX,
    STAGING_PREFIX,
    TRASH_PREFIX,
    list_checkpoints,
    read_manifest,
    remove_tree,
    step_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """How many permanent checkpoints of a kind stay; -1 is all."""

    sharded: int = -1
    unsharded: int = -1


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


def rotate(
    run_dir: Path,
    *,
    newest: Path,
    keep: Keep,
    protected: Collection[str] = (),
    remove: Callable[[Path], object] = remove_tree,
) -> None:
    """Delete what is no longer kept, by step number, after `newest` is on disk.

    Each kind is counted by itself. The newest checkpoint that a run can go on from always stays, and so does what
    cannot be read as a checkpoint, what is newer than `newest` and what is `protected`. Ephemeral ones go as soon as
    there is a newer one to go on from.

    Args:
        run_dir: the run directory.
        newest: the checkpoint that was just written.
        keep: permanent checkpoints to keep of each kind.
        protected: names of checkpoints that are in use.
        remove: how one is deleted.
    """
    left = {"sharded": keep.sharded, "unsharded": keep.unsharded}
    can_go_on = False
    try:
        present = list_checkpoints(run_dir)
    except OSError as error:
        logger.warning("cannot look for old checkpoints in %s: %s", run_dir, error)
        return
    for path in present:
        if step_of(path) > step_of(newest):
            continue
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if manifest.kind == "ephemeral":
            stays = not can_go_on
        else:
            stays = left[manifest.kind] != 0
            left[manifest.kind] -= 1 if left[manifest.kind] > 0 else 0
            stays = stays or (manifest.optimizer and not can_go_on)
        can_go_on = can_go_on or manifest.optimizer
        if not stays and path != newest and path.name not in protected:
            remove(path)


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
