"""Model and optimizer tensors of a checkpoint: one flat table of names, written whole or in shards.

`unsharded`: the model as Hugging Face writes it (`model*.safetensors`) and `optimizer.safetensors` beside it.
`sharded`: both in a torch distributed checkpoint under `sharded/`, each rank its part; it can be read back on any
number of ranks. In both, optimizer tensors are named `{parameter}.{state key}` (`...q_proj.weight.exp_avg`), so that
they find their parameter whatever the order of the groups.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from olmo_hf.errors import CheckpointError
from olmo_hf.training.parameter_groups import parameter_name

OPTIMIZER_FILE, OPTIMIZER_DESCRIPTION = "optimizer.safetensors", "optimizer.json"
SHARDED_DIR = "sharded"

Table = dict[str, torch.Tensor]

NUMBER = torch.float64
"""Type under which plain numbers of an optimizer's state are stored; no optimizer keeps float64 tensors here."""


def model_table(model: nn.Module) -> Table:
    """Parameters by plain name; a tied parameter stands once."""
    return {parameter_name(name): parameter for name, parameter in model.named_parameters()}


def optimizer_table(model: nn.Module, optimizer: torch.optim.Optimizer) -> Table:
    """Optimizer tensors as `{parameter}.{state key}`; plain numbers become 0-dimensional float64 tensors."""
    names = {id(parameter): parameter_name(name) for name, parameter in model.named_parameters()}
    table: Table = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                table[f"{names[id(parameter)]}.{key}"] = value
            elif isinstance(value, int | float):
                table[f"{names[id(parameter)]}.{key}"] = torch.tensor(float(value), dtype=NUMBER)
    return table


def local_bytes(*tables: Table) -> int:
    """Bytes that this rank holds of all tensors; one tensor under two names counts once."""
    held = {id(t): t.to_local() if isinstance(t, DTensor) else t for table in tables for t in table.values()}
    return sum(t.numel() * t.element_size() for t in held.values())


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on the CPU; a collective for a sharded one."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to("cpu")


def write_whole(path: Path, table: Table) -> None:
    """Write whole tensors into one file."""
    save_file(table, path, metadata={"format": "pt"})


def write_sharded(directory: Path, table: Table, group: torch.distributed.ProcessGroup | None) -> None:
    """Write tensors as a torch distributed checkpoint. All ranks of the group call, each with its part.

    Raises:
        CheckpointError: on all ranks.
    """
    with failures_of_torch():
        dcp.save(
            table,
            storage_writer=dcp.FileSystemWriter(directory, sync_files=False),  # synced when they are described
            process_group=group,
            no_dist=not torch.distributed.is_initialized(),
        )


@contextmanager
def failures_of_torch() -> Iterator[None]:
    """What fails inside a torch distributed checkpoint, as an error of ours: torch's own is no `Exception`."""
    try:
        yield
    except dcp.CheckpointException as error:
        failures = [f"rank {r}: {type(cause).__name__}: {cause}" for r, (cause, _) in sorted(error.failures.items())]
        raise CheckpointError("; ".join(failures)) from error


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """JSON of the optimizer's class, update rule and groups."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    described = {"class": type(optimizer).__name__, "rule": update_rule(optimizer), "groups": groups}
    return json.dumps(described, default=str, indent=1)


def update_rule(optimizer: torch.optim.Optimizer) -> str:
    """Name under which optimizers that can go on from each other's state agree: torch's class, if it builds on one."""
    bases = [cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim.")]
    return (bases[0] if bases and bases[0] is not torch.optim.Optimizer else type(optimizer)).__name__
