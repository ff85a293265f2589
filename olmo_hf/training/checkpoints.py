"""Writing a checkpoint and reading it back: what goes into the directory that `commit` makes whole."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from olmo_hf.distributed import all_agree, broadcast_object, gather_objects, is_main_process, rank, run_on_all
from olmo_hf.errors import CheckpointError, DamagedCheckpointError
from olmo_hf.training import commit, restoring, rotation, tensors
from olmo_hf.training.checked_files import CheckedFiles
from olmo_hf.training.disk import Disk
from olmo_hf.training.settling import SettlingFiles
from olmo_hf.training.snapshot import Contents, to_text
from olmo_hf.training.state import load_rng_state, rng_file

logger = logging.getLogger(__name__)

Group = torch.distributed.ProcessGroup | None
OnAll = Callable[[Callable[[], Any]], Any]
"""Runs an action on every rank; when it fails anywhere, all raise together."""

SPACE_MARGIN = 1.02
"""Room for the small files beside the tensors."""

_BAD_DISK = "the disk does not keep what is written: set training.output_dir to another one"


def reached(stage: str, step: int) -> None:
    """Called as a save gets on: `open`, `model`, `optimizer`, `state`, `manifest`, `done`. A test kills it there."""


def write_checkpoint(run_dir: Path, contents: Contents, *, disk: Disk, group: Group = None) -> commit.Manifest:
    """Write a checkpoint so that it is whole or absent. All ranks call, if need be in a thread.

    Args:
        run_dir: the run directory.
        contents: what this rank writes.
        disk: who else writes to the same file system.
        group: over which the ranks agree; in a thread it must not be the default one.

    Returns:
        The manifest of the whole checkpoint: where machines have disks of their own, more than lies on this one.

    Raises:
        CheckpointError: disk full, no permission; raised on all ranks, with older checkpoints untouched.
    """
    step = contents.step
    final, staging = commit.checkpoint_path(run_dir, step), commit.staging_path(run_dir, step)

    def on_all(action: Callable[[], Any]) -> Any:
        return run_on_all(action, lambda messages: _cannot_write(final, messages), group)

    try:
        _open_staging(run_dir, staging, contents, disk=disk, group=group, on_all=on_all)
        reached("open", step)
        with SettlingFiles(staging) as files:
            own_files = _write(files, staging, contents, disk=disk, group=group, on_all=on_all)
            parts = gather_objects(on_all(lambda: files.describe(own_files)), group)
        manifest = commit.Manifest(
            kind=contents.kind,
            optimizer=contents.has_optimizer,
            step=step,
            tokens=contents.tokens,
            world_size=contents.world_size,
            files={name: entry for part in reversed(parts) for name, entry in part.items()},  # rank 0's where several
            versions={package: version(package) for package in ("torch", "transformers", "accelerate")},
        )
        here = {name: entry for r in disk.ranks for name, entry in parts[r].items()}
        reached("manifest", step)
        on_all(lambda: commit.commit(staging, final, replace(manifest, files=here)) if disk.is_writer else None)
    except CheckpointError:
        if disk.is_writer:
            shutil.rmtree(staging, ignore_errors=True)  # gives the space of the failed attempt back
        raise
    reached("done", step)
    return manifest


def _cannot_write(final: Path, messages: list[str]) -> CheckpointError:
    return CheckpointError(
        f"cannot write {final}: {'; '.join(messages)}. Older checkpoints are untouched; free some space or mend the "
        "permissions and start the same command again"
    )


def _open_staging(
    run_dir: Path, staging: Path, contents: Contents, *, disk: Disk, group: Group, on_all: OnAll
) -> None:
    needed = gather_objects(contents.tensor_bytes, group)
    here = sum(needed[r] for r in disk.ranks) * (3 if contents.step == 0 else 1)  # the moments are still to come

    def action() -> None:
        if not disk.is_writer:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        if staging.exists():
            shutil.rmtree(staging)
        rotation.require_space(run_dir, int(SPACE_MARGIN * here))
        (staging / tensors.SHARDED_DIR if contents.sharded is not None else staging).mkdir(parents=True)

    on_all(action)


def _write(
    files: SettlingFiles, staging: Path, contents: Contents, *, disk: Disk, group: Group, on_all: OnAll
) -> list[str]:
    """Write this rank's part; returns the names of the files this rank answers for.

    Between two collectives nothing may fail on one rank alone: the others would wait for it.
    """
    if contents.sharded is not None:
        table, directory = contents.sharded, staging / tensors.SHARDED_DIR
        on_all(lambda: tensors.write_sharded(directory, table, group))
        _spread_index(directory / ".metadata", disk=disk, group=group, on_all=on_all)
        files.begin(*directory.glob(f"__{rank()}_*.distcp"))
    on_all(lambda: _write_model(files, staging, contents))
    reached("model", contents.step)
    on_all(lambda: _write_rest(files, staging, contents))
    reached("state", contents.step)
    own = [rng_file(rank())]
    own += [str(path.relative_to(staging)) for path in staging.glob(f"{tensors.SHARDED_DIR}/__{rank()}_*.distcp")]
    if disk.is_writer:
        everything = [str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file()]
        own += [name for name in everything if not commit.belongs_to_a_rank(name)]
    return sorted(own)


def _write_model(files: SettlingFiles, staging: Path, contents: Contents) -> None:
    if contents.shell is None:
        return
    contents.shell.save_pretrained(staging, state_dict=dict(contents.model))
    _begin_whole(files, staging, "model*.safetensors")
    if contents.tokenizer is not None:
        contents.tokenizer.save_pretrained(staging)


def _write_rest(files: SettlingFiles, staging: Path, contents: Contents) -> None:
    if contents.optimizer is not None:
        tensors.write_whole(staging / tensors.OPTIMIZER_FILE, contents.optimizer)
        _begin_whole(files, staging, tensors.OPTIMIZER_FILE)
    reached("optimizer", contents.step)
    for name, value in contents.files.items():
        (staging / name).write_text(to_text(value), encoding="utf-8")


def _begin_whole(files: SettlingFiles, staging: Path, pattern: str) -> None:
    for path in sorted(staging.glob(pattern)):
        path.chmod(staging.stat().st_mode & 0o666)  # safetensors makes them readable for the owner only
        files.begin(path)


def _spread_index(index: Path, *, disk: Disk, group: Group, on_all: OnAll) -> None:
    """Give every file system the index of the distributed checkpoint, which rank 0 wrote on its own."""
    own = on_all(lambda: index.read_bytes() if is_main_process() else b"")
    content = broadcast_object(own, group)
    on_all(lambda: index.write_bytes(content) if disk.is_writer and not is_main_process() else None)


def restore_tensors(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tensors.Table:
    """Fill the model, and the optimizer unless None, from a checkpoint. All ranks call.

    Every file that is read is compared with the manifest on the way; parameters have no meaning when this fails.

    Returns:
        The `extra` tensors of the snapshot.

    Raises:
        DamagedCheckpointError: on all ranks, when a file is damaged.
        CheckpointError: on all ranks, when names, shapes or types do not fit or weights are not numbers.
    """

    def on_all(action: Callable[[], Any]) -> Any:
        return run_on_all(action, lambda messages: CheckpointError("; ".join(messages)))

    files = on_all(lambda: CheckedFiles(checkpoint))
    if optimizer is not None:
        on_all(lambda: _require_same_rule(checkpoint, optimizer))
    try:
        targets = on_all(lambda: restoring.prepare(checkpoint, model, optimizer))
        for reader, table in targets.sources:
            on_all(partial(reader.fill, table, files))
        files.check_the_rest()
        on_all(lambda: restoring.finish(targets, optimizer))
    except CheckpointError:
        files.explain()
        raise
    return targets.extra


def read_back(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, disk: Disk) -> None:
    """Verify a run's first checkpoint, once on every file system, and restore it. All ranks call.

    Raises:
        CheckpointError: on all ranks: it is not what was written, and there is no older one.
    """
    run_on_all(
        lambda: commit.verify(checkpoint, tensors=False) if disk.is_writer else None,
        lambda messages: CheckpointError(f"{'; '.join(messages)}; {_BAD_DISK}"),
    )
    try:
        restore_tensors(checkpoint, model, optimizer)
    except DamagedCheckpointError as error:
        raise CheckpointError(f"{error}; {_BAD_DISK}") from error


def _require_same_rule(checkpoint: Path, optimizer: torch.optim.Optimizer) -> None:
    path = checkpoint / tensors.OPTIMIZER_DESCRIPTION
    try:
        described = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        there = described.get("rule")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not the description of an optimizer ({error}); choose another checkpoint"
        ) from error
    here = tensors.update_rule(optimizer)
    if there is not None and there != here:
        raise CheckpointError(
            f"{checkpoint}: holds the optimizer state of {there} and this launch uses {here}; go on with {there}, or "
            "begin another run with training.resume set to this path and training.reset_optimizer"
        )


def restore_rng(checkpoint: Path, world_size_then: int, world_size_now: int) -> None:
    """Put the random states back when the number of ranks is the same; otherwise say that they start anew."""
    found = world_size_then == world_size_now and load_rng_state(checkpoint, rank())
    if not all_agree(found) and is_main_process():
        logger.warning(
            "random states start anew: %s was written by %d processes and this run has %d%s. Data order is "
            "unaffected; dropout will draw other masks",
            checkpoint,
            world_size_then,
            world_size_now,
            "" if world_size_then != world_size_now else f", but {rng_file(0)} or another rank's is missing",
        )
