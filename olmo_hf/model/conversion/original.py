"""Checkpoints of the original OLMo trainer: every kind opened alike.

Kinds (spec: trainer.md section 8): unsharded (`model.pt` or `model.safetensors` with encoded names), and sharded
`torch_new`, `olmo_core`, `torch_legacy`, `local`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.lazy import LazyTable, from_memory, from_safetensors
from olmo_hf.model.conversion.safe_load import ShardedTensorRecord, decode_tensor_name, load_torch_file
from olmo_hf.model.conversion.sharded import (
    flat_optimizer_state,
    from_distributed_checkpoint,
    from_flat_parameters,
    from_rank_states,
    rank_files,
)

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "module.")
COUNTERS = ("epoch", "global_step", "global_train_examples_seen_this_epoch", "global_train_tokens_seen")


@dataclass(frozen=True, kw_only=True)
class OriginalCheckpoint:
    """What a checkpoint of the original holds; tensors are read on demand."""

    kind: str
    config: dict[str, Any]
    """The whole `config.yaml`."""
    weights: LazyTable
    """By the original's names without wrappers."""
    optimizer: LazyTable
    """`{parameter}.{state key}`; empty when there is none."""
    counters: dict[str, int]
    """Those of `COUNTERS` that the checkpoint has."""


def plain_name(name: str) -> str:
    """A parameter's name without what FSDP, torch.compile and DDP put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def kind_of(directory: Path) -> str | None:
    """`unsharded`, `torch_new`, `olmo_core`, `torch_legacy`, `local`, or None for anything else."""
    signs = {
        "unsharded": ("model.pt", "model.safetensors"),
        "torch_new": ("model_and_optim/.metadata",),
        "olmo_core": (".metadata",),
        "torch_legacy": ("rank0.pt",),
        "local": ("model/rank0.pt",),
    }
    if not (directory / "config.yaml").is_file():
        return None
    return next((kind for kind, files in signs.items() if any((directory / f).is_file() for f in files)), None)


def open_original(directory: Path) -> OriginalCheckpoint:
    """Open any kind of checkpoint of the original.

    Raises:
        ConversionError: not a checkpoint of the original, damaged, incomplete, or holding what is not safe to read.
    """
    kind = kind_of(directory)
    if kind is None:
        raise ConversionError(
            f"{directory}: no checkpoint of the original trainer; expected config.yaml beside model.pt, "
            "model.safetensors, model_and_optim/, .metadata, rank0.pt or model/rank0.pt"
        )
    readers: dict[str, Callable[[Path], tuple[LazyTable, LazyTable, Any]]] = {
        "unsharded": _open_unsharded,
        "torch_new": lambda path: _open_distributed(path, path / "model_and_optim"),
        "olmo_core": lambda path: _open_distributed(path, path),
        "torch_legacy": _open_legacy,
        "local": _open_local,
    }
    weights, optimizer, trainer = readers[kind](directory)
    counters = {name: int(trainer[name]) for name in COUNTERS if isinstance(trainer.get(name), int)}
    return OriginalCheckpoint(
        kind=kind,
        config=read_config(directory / "config.yaml"),
        weights={plain_name(name): tensor for name, tensor in weights.items()},
        optimizer={plain_name(name): tensor for name, tensor in optimizer.items()},
        counters=counters,
    )


def read_config(path: Path) -> dict[str, Any]:
    """The original's `config.yaml` with numbers as numbers (`1e-6` too) and interpolations left alone.

    Raises:
        ConversionError: not YAML, or without a `model` section.
    """
    try:
        config = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConversionError(f"{path}: cannot be read ({error}); copy it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ConversionError(
            f"{path}: has no `model` section; give the config.yaml of the run that wrote the weights"
        )
    return {str(key): value for key, value in config.items()}


def _open_unsharded(directory: Path) -> tuple[LazyTable, LazyTable, Any]:
    # The original, too, prefers safetensors where both are there.
    if (directory / "model.safetensors").is_file():
        weights = _decoded(directory / "model.safetensors")
    else:
        weights = from_memory(_tensors(directory / "model.pt"))
    optimizer: LazyTable = {}
    if (directory / "optim.safetensors").is_file():
        optimizer = _optimizer_from_paths(directory / "optim.safetensors")
    elif (directory / "optim.pt").is_file():
        optimizer = _optimizer_table(load_torch_file(directory / "optim.pt"))
    trainer_file = next((directory / n for n in ("train.pt", "other.pt") if (directory / n).is_file()), None)
    return weights, optimizer, {} if trainer_file is None else load_torch_file(trainer_file)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    content = load_torch_file(path)
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: holds a {type(content).__name__}; expected tensors by name")
    for name, value in content.items():
        if not isinstance(value, torch.Tensor) or isinstance(value, ShardedTensorRecord):
            raise ConversionError(f"{path}: {name} is a {type(value).__name__}; expected a whole tensor")
    return content


def _open_distributed(directory: Path, tensors: Path) -> tuple[LazyTable, LazyTable, Any]:
    table = from_distributed_checkpoint(tensors)
    weights = {name.removeprefix("model."): t for name, t in table.items() if name.startswith("model.")}
    prefix = "optim.state."
    optimizer = {name.removeprefix(prefix): t for name, t in table.items() if name.startswith(prefix)}
    return weights, optimizer, _rank_trainer_state(directory)


def _open_legacy(directory: Path) -> tuple[LazyTable, LazyTable, Any]:
    ranks = [load_torch_file(path) for path in rank_files(directory)]
    weights = from_rank_states([rank["model"] for rank in ranks])
    flat = [
        {f"{name}.{key}": value for name, state in rank["optim"]["state"].items() for key, value in state.items()}
        for rank in ranks
    ]
    return weights, from_rank_states(flat), ranks[0]


def _open_local(directory: Path) -> tuple[LazyTable, LazyTable, Any]:
    weights = from_flat_parameters(rank_files(directory / "model"))
    paths = rank_files(directory / "optim")
    names = _names_by_number(load_torch_file(paths[0])["param_groups"])
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    return weights, flat_optimizer_state(paths, shapes, names), _rank_trainer_state(directory)


def _rank_trainer_state(directory: Path) -> Any:
    path = directory / "train" / "rank0.pt"
    return load_torch_file(path) if path.is_file() else {}


def _names_by_number(groups: list[Mapping[str, Any]]) -> dict[Any, str]:
    return {
        number: plain_name(name)
        for group in groups
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }


def _optimizer_table(state: Mapping[str, Any]) -> LazyTable:
    """State keyed by parameter names (FSDP) or by numbers that the groups translate (DDP, one process)."""
    names = _names_by_number(state["param_groups"])
    flat: dict[str, torch.Tensor] = {}
    for number, values in state["state"].items():
        name = names.get(number, number)
        flat |= {f"{name}.{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)}
    return from_memory(flat)


def _decoded(path: Path) -> LazyTable:
    """Weights of a safetensors file whose names are encoded, or plain."""
    table = from_safetensors([path])
    if all(name.startswith("transformer.") for name in table):
        return table
    decoded = {}
    for key, tensor in table.items():
        where, is_pickled = decode_tensor_name(key)
        if is_pickled:
            raise ConversionError(f"{path}: {where} is a pickled value, expected only tensors among the weights")
        decoded[".".join(map(str, where))] = tensor
    return decoded


def _optimizer_from_paths(path: Path) -> LazyTable:
    """Optimizer state in the encoded safetensors format; only tensors under `state` are read, groups are not."""
    table: LazyTable = {}
    for key, tensor in from_safetensors([path]).items():
        where, is_pickled = decode_tensor_name(key)
        if is_pickled or where[0] != "state":
            continue
        if not isinstance(where[1], str):
            raise ConversionError(f"{path}: state is keyed by number {where[1]}; expected parameter names")
        table[f"{where[1]}.{where[2]}"] = tensor
    return table
