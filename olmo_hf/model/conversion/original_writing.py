"""Unsharded checkpoints as the original OLMo trainer writes and reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.lazy import LazyTable, LazyTensor, in_memory, write_safetensors
from olmo_hf.model.conversion.safe_load import encode_tensor_name, encode_value
from olmo_hf.model.conversion.tensor_names import TensorEntry
from olmo_hf.model.conversion.torch_file import write_torch_file

# What the original's optimizers (AdamW, Lion) keep for each parameter.
OPTIMIZER_KEYS = ("step", "exp_avg", "exp_avg_sq")

# What the original expects in every parameter group. Its trainer sets the learning rate and the bounds of clipping
# anew in each step, and weight decay when it starts.
_GROUP = {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "sharded": True, "max_grad_norm": None}
_GROUP |= {"max_grad_norm_ratio": None, "amsgrad": False, "maximize": False, "foreach": None, "capturable": False}
_GROUP |= {"differentiable": False, "fused": None}
_OLMO2_WEIGHT_DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class OriginalContent:
    """What goes into a checkpoint of the original, in its own words."""

    model_config: Mapping[str, Any]
    """The `model` section."""
    weights: LazyTable
    optimizer: LazyTable = field(default_factory=dict)
    """`{parameter}.{key}`, or empty."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's parameter groups; needed where there is optimizer state."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Where the run stands; empty: no `train.pt` is written."""


def write_original(directory: Path, content: OriginalContent, file_format: Literal["pt", "safetensors"]) -> None:
    """Write `config.yaml`, `model`, and where there is something to say, `optim` and `train.pt`, tensor by tensor.

    Args:
        directory: an existing, empty directory.
        content: what to write.
        file_format: of model and optimizer: `pt`, which all tools of the original read, or its safetensors, whose
            tensor names are encoded.
    """
    OmegaConf.save(OmegaConf.create({"model": dict(content.model_config)}), directory / "config.yaml")
    if content.counters:
        write_torch_file(directory / "train.pt", _trainer_state(content.counters))
    state: dict[str, dict[str, LazyTensor]] = {}
    for name, tensor in content.optimizer.items():
        parameter, key = name.rsplit(".", 1)
        state.setdefault(parameter, {})[key] = tensor
    optimizer = {"state": state, "param_groups": content.groups}
    if file_format == "pt":
        write_torch_file(directory / "model.pt", content.weights)
        if state:
            write_torch_file(directory / "optim.pt", optimizer)
        return
    _write_encoded(directory / "model.safetensors", {(name,): tensor for name, tensor in content.weights.items()})
    if state:
        table: dict[tuple[str, ...], Any] = {
            ("state", parameter, key): tensor for parameter, values in state.items() for key, tensor in values.items()
        }
        _write_encoded(directory / "optim.safetensors", table | {("param_groups",): content.groups})


def original_groups(groups: Sequence[Mapping[str, Any]], entries: list[TensorEntry]) -> list[dict[str, Any]]:
    """Parameter groups by our names (`param_names`) as groups by the original's names.

    Args:
        groups: those of a run; empty: the rule of OLMo-2, where everything decays but the embeddings.
        entries: the table of names.

    Raises:
        ConversionError: parts of one tensor of the original are in different groups, or in none.
    """
    if not groups:
        embeddings = ("model.embed_tokens.", "model.embed_positions.")
        ours = [name for entry in entries for name in entry.ours]
        groups = [
            {"param_names": [n for n in ours if not n.startswith(embeddings)], "weight_decay": _OLMO2_WEIGHT_DECAY},
            {"param_names": [n for n in ours if n.startswith(embeddings)], "weight_decay": 0.0},
        ]
    owners = {name: number for number, group in enumerate(groups) for name in group["param_names"]}
    members: list[list[str]] = [[] for _ in groups]
    for entry in entries:
        found = {owners.get(name) for name in entry.ours}
        number = found.pop()
        if found or number is None:
            raise ConversionError(
                f"{entry.original}: {', '.join(entry.ours)} are not in one parameter group of the optimizer, as the "
                "original has it; leave the optimizer out with --no-optimizer"
            )
        members[number].append(entry.original)
    known = (*_GROUP, "weight_decay")
    return [
        _GROUP
        | {key: group[key] for key in known if key in group and key != "betas"}
        | ({"betas": tuple(group["betas"])} if "betas" in group else {})
        | {"param_names": sorted(names), "params": sorted(names)}
        for group, names in zip(groups, members, strict=True)
        if names
    ]


def refuse_foreign_state(optimizer: LazyTable) -> None:
    """Raise ConversionError where the original's optimizers have no such state."""
    foreign = sorted({name.rsplit(".", 1)[1] for name in optimizer} - set(OPTIMIZER_KEYS))
    if foreign:
        raise ConversionError(
            f"the optimizers of the original (AdamW, Lion) keep no {', '.join(foreign)}; leave the optimizer out with "
            "--no-optimizer"
        )


def _trainer_state(counters: Mapping[str, int]) -> dict[str, Any]:
    """The original restores random states only if there are some, and looks for older checkpoints in its own lists."""
    lists: dict[str, Any] = {"checkpoints": [], "unsharded_checkpoints": [], "ephemeral_checkpoints": []}
    return {**counters, **lists}


def _write_encoded(path: Path, table: Mapping[tuple[str, ...], Any]) -> None:
    """The original's safetensors: names are encoded paths, and what is no tensor is a pickle in a tensor of bytes."""
    tensors: LazyTable = {}
    for where, value in table.items():
        is_tensor = isinstance(value, LazyTensor)
        name = encode_tensor_name(where, is_pickled=not is_tensor)
        tensors[name] = value if is_tensor else in_memory(encode_value(value))
    write_safetensors(path, tensors)
