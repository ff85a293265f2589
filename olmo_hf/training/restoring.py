"""Giving a model and an optimizer back what a checkpoint holds, and proving that nothing is there by accident."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from olmo_hf.errors import CheckpointError
from olmo_hf.training.parameter_groups import parameter_name
from olmo_hf.training.readers import Reader
from olmo_hf.training.tensors import NUMBER, Table, model_table

OF_THE_PARAMETERS_SHAPE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
"""Keys of an optimizer's state under which there is a number for every element of the parameter."""


def restore_model(reader: Reader, model: nn.Module, *, source: Path) -> None:
    """Fill every parameter from the checkpoint, and prove that none was missed.

    Parameters are set to NaN first; none may be NaN afterwards.

    Raises:
        CheckpointError: names missing on either side, other shapes, or NaN weights.
    """
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
        raise CheckpointError(f"{source}: shapes or types differ: " + "; ".join(wrong[:5]))
    with torch.no_grad():
        for parameter in table.values():
            parameter.fill_(float("nan"))
    reader.fill(table)
    bad = [name for name, parameter in table.items() if _has_nan(parameter)]
    if bad:
        raise CheckpointError(f"{source}: weights that are not numbers after loading: {', '.join(bad[:5])}")


def _has_nan(tensor: torch.Tensor) -> bool:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # the sum needs no memory; only when it is no number, which opposite infinities bring about too, is each looked at
    return bool(local.sum().isnan().item()) and bool(local.isnan().any().item())


def _compare_names(here: set[str], there: set[str], source: Path) -> None:
    if missing := sorted(here - there):
        raise CheckpointError(f"{source}: {len(missing)} tensors are missing, among them {', '.join(missing[:5])}")
    if unknown := sorted(there - here):
        raise CheckpointError(f"{source}: {len(unknown)} tensors belong to no parameter: {', '.join(unknown[:5])}")


def restore_optimizer(reader: Reader, model: nn.Module, optimizer: torch.optim.Optimizer, *, source: Path) -> None:
    """Give every parameter of the optimizer its state back; hyperparameters stay those of this launch.

    Moments get a NaN at either end first; a tensor that still has it was not read.

    Raises:
        CheckpointError: state of unknown parameters, parameters without any or with less than others of their kind,
            other shapes, or what is no number.
    """
    stored = [name for name in reader.names() if name.startswith("optimizer.")]
    if not stored:
        return  # saved before the first step
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
                    f"{tuple(parameter.shape)} here"
                )
            on_device = key != "step" or group.get("fused") or group.get("capturable")
            targets[full_name] = _like(parameter, shape, dtype, on_device=bool(on_device))
            state[parameter][key] = targets[full_name]
    if unknown := sorted(set(stored) - set(targets)):
        raise CheckpointError(f"{source}: optimizer state of unknown parameters: {', '.join(unknown[:5])}")
    reader.fill(targets)
    if bad := [name for name, target in targets.items() if _ends(target).isnan().any()]:
        raise CheckpointError(f"{source}: optimizer state that is no number after loading: {', '.join(bad[:5])}")
    for values in state.values():
        numbers = {key: value.item() for key, value in values.items() if value.dtype == NUMBER}
        # Some optimizers refuse a counter that is a float; none minds an int.
        values.update({key: int(number) if number.is_integer() else number for key, number in numbers.items()})
    optimizer.state.clear()
    optimizer.state.update(state)


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


def read_extra(reader: Reader) -> Table:
    """Tensors saved as `extra` (all whole), by name."""
    targets = {
        n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in reader.layout().items() if n.startswith("extra.")
    }
    if targets:
        reader.fill(targets)
    return {name.removeprefix("extra."): tensor for name, tensor in targets.items()}
