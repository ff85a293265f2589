"""What goes into a checkpoint, taken from a run: as it stands in memory, or copied so that training can go on."""

import copy
import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerState

from olmo_hf.distributed import rank
from olmo_hf.errors import CheckpointError
from olmo_hf.training import tensors
from olmo_hf.training.commit import Kind
from olmo_hf.training.parameter_groups import parameter_name
from olmo_hf.training.state import RUN_STATE, RunState, random_states, rng_file

TRAINER_STATE = "trainer_state.json"


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


@dataclass(kw_only=True)
class Contents:
    """What this rank writes of one checkpoint."""

    kind: Kind
    has_optimizer: bool
    step: int
    tokens: int
    world_size: int

    sharded: tensors.Table | None
    """Goes into the distributed checkpoint, each rank its part; None: there is none."""

    model: tensors.Table
    """State of the whole model, on writers only."""

    optimizer: tensors.Table | None
    """State of the whole optimizer with what is kept beside it, on writers only; None: it is not written here."""

    shell: PreTrainedModel | None
    """Knows how the model is saved, for writers; its configuration is its own."""

    tokenizer: PreTrainedTokenizerBase | None
    files: dict[str, Any]
    """Small files: name -> text, or a value that is written as JSON."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return tensors.local_bytes(self.sharded or {}, self.model, self.optimizer or {})


class Copies:
    """Memory on the CPU that holds a copy of a run's tensors; kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._held: tensors.Table = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all copies on this rank."""
        return tensors.local_bytes(self._held)

    def of(self, table: tensors.Table, purpose: str) -> tensors.Table:
        """The table with its tensors copied; what was one tensor under two names stays one.

        Args:
            table: tensors by name; of sharded ones the part of this rank is copied.
            purpose: tells tensors of the same name apart.
        """
        made: dict[int, torch.Tensor] = {}
        copied = {}
        for name, tensor in table.items():
            if id(tensor) not in made:
                made[id(tensor)] = self._copy(tensor.detach(), f"{purpose}.{name}")
            copied[name] = made[id(tensor)]
        return copied

    def _copy(self, tensor: torch.Tensor, key: str) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        held = self._held.get(key)
        if held is None or held.shape != local.shape or held.dtype != local.dtype:
            held = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._held[key] = held
        if (
            local.device.type == "cpu" and local.is_contiguous()
        ):  # one plain copy: threads that meet after every tensor wait for busy cores
            np.copyto(_bytes_of(held), _bytes_of(local))
        else:
            held.copy_(local, non_blocking=True)
        return DTensor(held, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else held


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def take(
    snapshot: Snapshot, *, kind: Kind, has_optimizer: bool, is_writer: bool, copies: Copies | None = None
) -> Contents:
    """What this rank will write. All ranks call: gathering a sharded model is a collective.

    Sharded runs keep the optimizer in the distributed checkpoint in every kind, so that no rank ever holds all of it.

    Args:
        snapshot: the run.
        kind: `unsharded` can be loaded by `from_pretrained`.
        has_optimizer: whether a run can go on from it.
        is_writer: whether this process writes what is written once.
        copies: where to copy to, so that training may go on; None: nothing is copied that is on the CPU already.

    Raises:
        CheckpointError: the model is none of `transformers`.
    """
    whole = kind == "unsharded" or not snapshot.is_sharded
    if whole and not isinstance(snapshot.model, PreTrainedModel):
        raise CheckpointError(
            f"{type(snapshot.model).__name__}: cannot be saved, expected a PreTrainedModel of transformers"
        )
    model = _whole_model(snapshot.model, keep=is_writer) if whole else {}
    sharded = optimizer = None
    if snapshot.is_sharded and (has_optimizer or not whole):
        parts = {} if whole else {f"model.{n}": t.detach() for n, t in tensors.model_table(snapshot.model).items()}
        sharded = parts | (_optimizer_and_extra(snapshot) if has_optimizer else {})
    elif has_optimizer and is_writer:
        optimizer = {name: tensor.contiguous() for name, tensor in _optimizer_and_extra(snapshot).items()}
    if copies is not None:
        model = copies.of(model, "model")
        sharded = copies.of(sharded, "sharded") if sharded is not None else None
        optimizer = copies.of(optimizer, "optimizer") if optimizer is not None else None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies were only asked for
    elif optimizer is not None:
        optimizer = {name: tensor.detach().to("cpu") for name, tensor in optimizer.items()}
    return Contents(
        kind=kind,
        has_optimizer=has_optimizer,
        step=snapshot.run_state.step,
        tokens=snapshot.run_state.tokens,
        world_size=snapshot.run_state.world_size,
        sharded=sharded,
        model=model,
        optimizer=optimizer,
        shell=_shell(cast(PreTrainedModel, snapshot.model)) if whole and is_writer else None,
        tokenizer=snapshot.tokenizer,
        files=_small_files(snapshot, is_writer=is_writer),
    )


def _optimizer_and_extra(snapshot: Snapshot) -> tensors.Table:
    table = tensors.optimizer_table(snapshot.model, snapshot.optimizer)
    return {f"optimizer.{n}": t for n, t in table.items()} | {f"extra.{n}": t for n, t in snapshot.extra.items()}


def _whole_model(model: nn.Module, *, keep: bool) -> tensors.Table:
    """State of the model with whole tensors on the CPU; a tied parameter is one tensor under its names."""
    gathered: dict[int, torch.Tensor] = {}
    table = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            whole = tensors.full_tensor(tensor)  # a collective when sharded
            gathered[id(tensor)] = whole if keep else torch.empty(0)
        table[parameter_name(name)] = gathered[id(tensor)]
    return table if keep else {}


def _shell(model: PreTrainedModel) -> PreTrainedModel:
    """The model with a configuration of its own, whose changes training does not see."""
    shell = object.__new__(type(model))  # `copy.copy` would call the class, which FSDP has replaced
    shell.__dict__.update(model.__dict__)
    # who writes is decided here; by itself it would be rank 0 only, also where others have disks of their own
    shell.__dict__["should_save_on_this_rank"] = lambda is_main_process: True
    shell.config = copy.deepcopy(model.config)
    shell.config.use_cache = True  # the Trainer turns it off for training; whoever loads the model generates
    return shell


def _small_files(snapshot: Snapshot, *, is_writer: bool) -> dict[str, Any]:
    files: dict[str, Any] = {rng_file(rank()): random_states()}
    if is_writer:
        files[RUN_STATE] = dataclasses.asdict(snapshot.run_state)
        files[TRAINER_STATE] = plain(dataclasses.asdict(snapshot.trainer_state))
        files[tensors.OPTIMIZER_DESCRIPTION] = tensors.describe_optimizer(snapshot.optimizer)
    return files


def plain(value: Any) -> Any:
    """As strict JSON can hold it: tensors and numpy scalars as numbers, and what is no number as null."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if hasattr(value, "item") and callable(value.item):
        value = value.item() if getattr(value, "size", 1) == 1 or value.numel() == 1 else value.tolist()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_text(value: Any) -> str:
    """A small file's content."""
    return value if isinstance(value, str) else json.dumps(value, indent=1, allow_nan=False, sort_keys=True)
