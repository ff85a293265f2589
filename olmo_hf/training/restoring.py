"""Giving a model and an optimizer back what a checkpoint holds, and proving that nothing is there by accident."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from olmo_hf.errors import CheckpointError
from olmo_hf.training.parameter_groups import parameter_name
from olmo_hf.training.readers import Reader, open_reader
from olmo_hf.training.tensors import NUMBER, Table, model_table

OF_THE_PARAMETERS_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Keys of an optimizer's state under which there is a number for every element of the parameter."""

_OTHER = "choose a checkpoint from before that happened"
_OF_THIS_MODEL = "choose a checkpoint of this model, or set model.config to the one of the checkpoint"


@dataclass(kw_only=True)
class Targets:
    """Where the tensors of a checkpoint go."""

    source: Path
    model: Table
    optimizer: Table = field(default_factory=dict)
    extra: Table = field(default_factory=dict)
    """Tensors saved as `extra` (all whole), by name."""

    sources: list[tuple[Reader, Table]] = field(default_factory=list)
    """Who reads what; on all ranks the same readers in the same order."""

    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    """What the optimizer will hold, by parameter."""


def prepare(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Targets:
    """Compare what a checkpoint holds with what a run needs, and lay out where it goes; nothing is read yet.

    Parameters are set to NaN; the optimizer, unless None, keeps its state until `finish`.

    Raises:
        CheckpointError: names missing on either side, or other shapes or types.
    """
    model_reader, optimizer_reader = open_reader(checkpoint)
    targets = Targets(source=checkpoint, model=_model_targets(model_reader, model, source=checkpoint))
    read = {id(model_reader): (model_reader, dict(targets.model))}
    if optimizer is not None:
        if optimizer_reader is None:
            raise CheckpointError(
                f"{checkpoint}: holds no optimizer state; set training.reset_optimizer to start it afresh"
            )
        targets.optimizer, targets.state = _optimizer_targets(optimizer_reader, model, optimizer, source=checkpoint)
        targets.extra = _extra_targets(optimizer_reader)
        more = targets.optimizer | {f"extra.{name}": tensor for name, tensor in targets.extra.items()}
        read.setdefault(id(optimizer_reader), (optimizer_reader, {}))[1].update(more)
    targets.sources = list(read.values())
    return targets


def finish(targets: Targets, optimizer: torch.optim.Optimizer | None) -> None:
    """Prove that everything was read, and give the optimizer, unless None, its state; hyperparameters stay.

    Raises:
        CheckpointError: something is not a number.
    """
    source = targets.source
    if bad := [name for name, parameter in targets.model.items() if _has_nan(parameter)]:
        raise CheckpointError(f"{source}: holds weights that are not numbers ({', '.join(bad[:5])}); {_OTHER}")
    if bad := [name for name, target in targets.optimizer.items() if _ends(target).isnan().any()]:
        raise CheckpointError(f"{source}: holds optimizer state that is no number ({', '.join(bad[:5])}); {_OTHER}")
    if optimizer is None or not targets.state:  # saved before the first step
        return
    for values in targets.state.values():
        numbers = {key: value.item() for key, value in values.items() if value.dtype == NUMBER}
        # Some optimizers refuse a counter that is a float; none minds an int.
        values.update({key: int(number) if number.is_integer() else number for key, number in numbers.items()})
    optimizer.state.clear()
    optimizer.state.update(targets.state)


def _model_targets(reader: Reader, model: nn.Module, *, source: Path) -> Table:
    table = {f"model.{name}": parameter for name, parameter in model_table(model).items()}
    stored = {name for name in reader.names() if name.startswith("model.")}
    _compare_names(set(table), stored, source)
    layout = reader.layout()
    wrong = [
        f"{name} is {tuple(layout[name][0])} {layout[name][1]} there and {tuple(here.shape)} {here.dtype} here"
        for name, here in table.items()
        if layout[name] != (here.shape, here.dtype)
    ]
    if wrong:
        raise CheckpointError(f"{source}: shapes or types differ: {'; '.join(wrong[:5])}; {_OF_THIS_MODEL}")
    with torch.no_grad():
        for parameter in table.values():
            parameter.fill_(float("nan"))
    return table


def _has_nan(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # the sum needs no memory; only when it is no number, which opposite infinities bring about too, is each looked at
    return bool(local.sum().isnan().item()) and bool(local.isnan().any().item())


def _compare_names(here: set[str], there: set[str], source: Path) -> None:
    if missing := sorted(here - there):
        raise CheckpointError(
            f"{source}: {len(missing)} tensors are missing, among them {', '.join(missing[:5])}; {_OF_THIS_MODEL}"
        )
    if unknown := sorted(there - here):
        raise CheckpointError(
            f"{source}: {len(unknown)} tensors belong to no parameter: {', '.join(unknown[:5])}; {_OF_THIS_MODEL}"
        )


def _optimizer_targets(
    reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer, *, source: Path
) -> tuple[Table, dict[torch.Tensor, dict[str, Any]]]:
    """Memory for the optimizer's tensors, by their names, and the same by parameter.

    Moments have a NaN at either end; a tensor that still has it in the end was not read.
    """
    stored = [name for name in reader.names() if name.startswith("optimizer.")]
    if not stored:
        return {}, {}  # saved before the first step
    layout, targets = reader.layout(), {}
    state: dict[torch.Tensor, dict[str, Any]] = {}
    keys = {name: list(_state_keys(stored, name)) for name, _, _ in _named_parameters_of(model, optimizer)}
    _require_complete_state(keys, model, optimizer, source)
    for name, parameter, group in _named_parameters_of(model, optimizer):
        state[parameter] = {}
        for key in keys[name]:
            full_name = f"optimizer.{name}.{key}"
            shape, dtype = layout[full_name]
            if key in OF_THE_PARAMETERS_SHAPE and shape != parameter.shape:
                raise CheckpointError(
                    f"{source}: shapes differ: {full_name} is {tuple(shape)} there and the parameter "
                    f"{tuple(parameter.shape)} here; {_OF_THIS_MODEL}"
                )
            on_device = key != "step" or group.get("fused") or group.get("capturable")
            targets[full_name] = _like(parameter, shape, dtype, on_device=bool(on_device))
            state[parameter][key] = targets[full_name]
    if unknown := sorted(set(stored) - set(targets)):
        raise CheckpointError(
            f"{source}: optimizer state of unknown parameters: {', '.join(unknown[:5])}; {_OF_THIS_MODEL}"
        )
    return targets, state


def _require_complete_state(
    keys: dict[str, list[str]], model: nn.Module, optimizer: torch.optim.Optimizer, source: Path
) -> None:
    """Parameters of one group with as many dimensions are treated alike, so they have the same keys."""
    kinds: dict[tuple[int, int], set[str]] = {}
    for name, parameter, group in _named_parameters_of(model, optimizer):
        known = {"step", *OF_THE_PARAMETERS_SHAPE} & set(keys[name])  # others, of 8-bit states, depend on the size
        kinds.setdefault((id(group), parameter.dim()), set()).update(known)
    for name, parameter, group in _named_parameters_of(model, optimizer):
        if not keys[name]:
            raise CheckpointError(
                f"{source}: no optimizer state for {name}; set training.reset_optimizer to start afresh"
            )
        if missing := sorted(kinds[id(group), parameter.dim()] - set(keys[name])):
            raise CheckpointError(
                f"{source}: the optimizer state of {name} lacks {', '.join(missing)}; set training.reset_optimizer "
                "to start afresh"
            )


def _state_keys(stored: list[str], name: str) -> Iterator[str]:
    prefix = f"optimizer.{name}."
    for full_name in stored:
        if full_name.startswith(prefix) and "." not in full_name[len(prefix) :]:
            yield full_name[len(prefix) :]


def _named_parameters_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, nn.Parameter, dict]]:
    names = {id(parameter): parameter_name(name) for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter, group


def _like(parameter: nn.Parameter, shape: torch.Size, dtype: torch.dtype, *, on_device: bool) -> torch.Tensor:
    if shape == parameter.shape and shape != torch.Size():
        target = torch.empty_like(parameter, dtype=dtype, requires_grad=False)  # filled before anyone reads it
        if dtype.is_floating_point:
            _ends(target).fill_(float("nan"))
        return target
    return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _ends(tensor: torch.Tensor) -> torch.Tensor:
    """View of the first and the last element that this rank holds; of whole numbers and small tensors of none."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = local.detach().reshape(-1)
    return flat[:: flat.numel() - 1] if flat.is_floating_point() and flat.numel() > 1 else flat[:0]


def _extra_targets(reader: Reader) -> Table:
    return {
        name.removeprefix("extra."): torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in reader.layout().items()
        if name.startswith("extra.")
    }
