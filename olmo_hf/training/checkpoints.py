"""Writing a checkpoint and reading it back: what goes into the directory that `commit` makes whole."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from olmo_hf.distributed import all_agree, barrier, gather_objects, is_main_process, rank, run_on_all
from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit, tensors
from olmo_hf.training.state import RunState, load_rng_state, save_rng_state, save_run_state

logger = logging.getLogger(__name__)

TRAINER_STATE = "trainer_state.json"
SPACE_MARGIN = 1.02
"""Room for the small files beside the tensors."""


@dataclass(kw_only=True)
class Snapshot:
    """All that a checkpoint holds, as it stands in memory."""

    model: nn.Module
    """Unwrapped; its parameters may be DTensors."""

    optimizer: torch.optim.Optimizer
    run_state: RunState
    trainer_state: TrainerState
    tokenizer: PreTrainedTokenizerBase | None = None
    extra: tensors.Table = field(default_factory=dict)
    """Whole tensors kept beside the optimizer, for example the memory of adaptive clipping."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only its part."""
        return any(isinstance(parameter, DTensor) for parameter in self.model.parameters())


def save_checkpoint(
    run_dir: Path, snapshot: Snapshot, *, kind: commit.Kind, keep: int, on_stage: Callable[[str], None] | None = None
) -> Path:
    """Write a checkpoint so that it is whole or absent, then rotate older ones. All ranks call.

    Args:
        run_dir: the run directory.
        snapshot: what to write.
        kind: `unsharded` can be loaded by `from_pretrained`; of `ephemeral` ones only the newest is kept.
        keep: number of permanent checkpoints to keep; -1 keeps all.
        on_stage: called with the name of each stage reached (`open`, `model`, `optimizer`, `state`, `manifest`,
            `done`); lets a test kill the process there.

    Raises:
        CheckpointError: disk full, no permission; raised on all ranks, with older checkpoints untouched.
    """
    reached = on_stage if on_stage is not None else _ignore
    step = snapshot.run_state.step
    final, staging = commit.checkpoint_path(run_dir, step), commit.staging_path(run_dir, step)
    try:
        _all_ranks(lambda: _open_staging(run_dir, staging, snapshot), final)
        reached("open")
        own_files = _all_ranks(lambda: _write(staging, snapshot, kind, reached), final)
        described = gather_objects(_all_ranks(lambda: commit.describe_files(staging, own_files), final))
        manifest = commit.Manifest(
            kind=kind,
            step=step,
            tokens=snapshot.run_state.tokens,
            world_size=snapshot.run_state.world_size,
            files={name: entry for part in described for name, entry in part.items()},
            versions={package: version(package) for package in ("torch", "transformers", "accelerate")},
        )
        reached("manifest")
        _all_ranks(lambda: commit.commit(staging, final, manifest) if is_main_process() else None, final)
    except CheckpointError:
        if is_main_process():
            shutil.rmtree(staging, ignore_errors=True)  # gives the space of the failed attempt back
        raise
    reached("done")
    if is_main_process():
        commit.rotate(run_dir, newest=final, keep=keep)
    barrier()
    return final


def _ignore(stage: str) -> None:
    """No one watches the stages of this save."""


def _all_ranks(action: Callable[[], Any], final: Path) -> Any:
    return run_on_all(
        action,
        lambda messages: CheckpointError(
            f"cannot write {final}: {'; '.join(messages)}. Older checkpoints are untouched; free some space or mend "
            "the permissions and start the same command again"
        ),
    )


def _open_staging(run_dir: Path, staging: Path, snapshot: Snapshot) -> None:
    if not is_main_process():
        return
    if staging.exists():
        shutil.rmtree(staging)
    model_bytes = tensors.table_bytes(tensors.model_table(snapshot.model))
    optimizer = tensors.optimizer_table(snapshot.model, snapshot.optimizer)
    # Before the first step there is no optimizer state yet; the next checkpoint will have AdamW's two moments.
    optimizer_bytes = tensors.table_bytes(optimizer, snapshot.extra) if optimizer else 2 * model_bytes
    commit.require_space(run_dir, int(SPACE_MARGIN * (model_bytes + optimizer_bytes)))
    staging.mkdir(parents=True)


def _write(staging: Path, snapshot: Snapshot, kind: commit.Kind, reached: Callable[[str], None]) -> list[str]:
    """Write this rank's part; returns the names of the files this rank answers for."""
    if snapshot.is_sharded:
        tensors.write_sharded(
            staging,
            tensors.model_table(snapshot.model),
            tensors.optimizer_table(snapshot.model, snapshot.optimizer),
            snapshot.extra,
        )
    if kind == "unsharded" or not snapshot.is_sharded:
        _write_model(staging, snapshot)
    reached("model")
    if not snapshot.is_sharded:
        tensors.write_optimizer(
            staging,
            tensors.optimizer_table(snapshot.model, snapshot.optimizer),
            snapshot.extra,
            writer=is_main_process(),
        )
    reached("optimizer")
    own = [save_rng_state(staging, rank())]
    if is_main_process():
        save_run_state(snapshot.run_state, staging)
        snapshot.trainer_state.save_to_json(str(staging / TRAINER_STATE))
        (staging / "optimizer.json").write_text(tensors.describe_optimizer(snapshot.optimizer), encoding="utf-8")
    barrier()
    reached("state")
    if is_main_process():
        everything = [str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file()]
        own += [name for name in everything if not _belongs_to_a_rank(name)]
    own += [str(path.relative_to(staging)) for path in staging.glob(f"{tensors.SHARDED_DIR}/__{rank()}_*.distcp")]
    return sorted(own)


def _belongs_to_a_rank(name: str) -> bool:
    return name.startswith("rng_state_") or name.endswith(".distcp")


def _write_model(staging: Path, snapshot: Snapshot) -> None:
    model = snapshot.model
    state = {}
    for name, tensor in model.state_dict().items():
        whole = tensors.full_tensor(tensor)  # a collective when sharded
        if is_main_process():
            state[tensors.plain_name(name)] = whole
    if not is_main_process():
        return
    if not isinstance(model, PreTrainedModel):
        raise CheckpointError(f"{type(model).__name__} is not a PreTrainedModel and cannot be saved as one")
    use_cache = model.config.use_cache
    model.config.use_cache = True  # the Trainer turns it off for training; whoever loads the model generates
    try:
        model.save_pretrained(staging, state_dict=state)
    finally:
        model.config.use_cache = use_cache
    if snapshot.tokenizer is not None:
        snapshot.tokenizer.save_pretrained(staging)


def restore_tensors(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tensors.Table:
    """Fill the model, and the optimizer unless None, from a checkpoint. All ranks call.

    Returns:
        The `extra` tensors of the snapshot.

    Raises:
        CheckpointError: on all ranks, when names or shapes do not fit or weights are not numbers.
    """

    def action() -> tensors.Table:
        model_reader, optimizer_reader = tensors.open_reader(checkpoint)
        tensors.restore_model(model_reader, model, source=checkpoint)
        if optimizer is None:
            return {}
        if optimizer_reader is None:
            raise CheckpointError(
                f"{checkpoint}: holds no optimizer state; set training.reset_optimizer to start it afresh"
            )
        tensors.restore_optimizer(optimizer_reader, model, optimizer, source=checkpoint)
        return tensors.read_extra(optimizer_reader)

    return run_on_all(action, lambda messages: CheckpointError("; ".join(messages)))


def restore_rng(checkpoint: Path, world_size_then: int, world_size_now: int) -> None:
    """Put the random states back when the number of ranks is the same; otherwise say that they start anew."""
    found = world_size_then == world_size_now and load_rng_state(checkpoint, rank())
    if not all_agree(found) and is_main_process():
        logger.warning(
            "random states start anew: %s was written by %d processes and this run has %d. Data order is unaffected; "
            "dropout will draw other masks",
            checkpoint,
            world_size_then,
            world_size_now,
        )
