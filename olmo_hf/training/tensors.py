"""Model and optimizer tensors in a checkpoint: one flat table of names, written whole or in shards.

`unsharded`: the model as Hugging Face writes it (`model*.safetensors`) and `optimizer.safetensors` beside it.
`sharded`: both in a torch distributed checkpoint under `sharded/`, each rank its part; it can be read back on any
number of ranks. In both, optimizer tensors are named `{parameter}.{state key}` (`...q_proj.weight.exp_avg`), so that
they find their parameter whatever the order of the groups.
"""

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from olmo_hf.errors import CheckpointError
from olmo_hf.model.conversion.safe_load import check_index
from olmo_hf.training.parameter_groups import parameter_name

OPTIMIZER_FILE = "optimizer.safetensors"
SHARDED_DIR = "sharded"
READERS = 4
"""Threads that read a file of whole tensors."""


Table = dict[str, torch.Tensor]
Layout = dict[str, tuple[torch.Size, torch.dtype]]
"""Shape (of the whole tensor) and type, by name."""

NUMBER = torch.float64
"""Type under which plain numbers of an optimizer's state are stored; no optimizer keeps float64 tensors here."""

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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


def table_bytes(*tables: Table) -> int:
    """Bytes of all tensors, shards counted in full."""
    return sum(t.numel() * t.element_size() for table in tables for t in table.values())


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
    """Write tensors as a torch distributed checkpoint. All ranks of the group call, each with its part."""
    dcp.save(
        table,
        storage_writer=dcp.FileSystemWriter(directory, sync_files=False),  # synced when they are described
        process_group=group,
        no_dist=not torch.distributed.is_initialized(),
    )


class WholeReader:
    """Tensors of safetensors files, one at a time."""

    def __init__(self, paths: Iterable[Path], prefix: str = ""):
        self.where: dict[str, Path] = {}
        self.prefix = prefix
        for path in paths:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                    self.where[prefix + key] = path

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.where)

    def fill(self, targets: Table) -> None:
        """Copy into the targets, in place; a sharded target takes its part."""
        by_file: dict[Path, Table] = {}
        for name, target in targets.items():
            by_file.setdefault(self.where[name], {})[name.removeprefix(self.prefix)] = target
        for path, table in by_file.items():
            left = read_directly(path, table)
            with safe_open(path, framework="pt") as file:
                for key, target in left.items():
                    _copy_into(target, file, key)

    def layout(self) -> Layout:
        """Shape and type of every tensor."""
        found = {}
        for path in sorted(set(self.where.values())):
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    part = file.get_slice(key)
                    found[self.prefix + key] = (torch.Size(part.get_shape()), SAFETENSORS_DTYPES[part.get_dtype()])
        return found


def read_directly(path: Path, table: Table) -> Table:
    """Read from a safetensors file straight into the memory of tensors; returns those for which that is not possible.

    It is for whole tensors on the CPU of the type that is stored, and needs no memory of its own.

    Raises:
        CheckpointError: the file ends too early.
    """
    with open(path, "rb", buffering=0) as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))

        def read(key: str) -> None:
            begin, end = header[key]["data_offsets"]
            memory = table[key].detach().reshape(-1).view(torch.uint8).numpy().data
            done = 0
            while done < end - begin:
                count = os.preadv(file.fileno(), [memory[done:]], 8 + header_bytes + begin + done)
                if count == 0:
                    raise CheckpointError(f"{path}: ends inside {key}")
                done += count

        def is_direct(key: str, target: torch.Tensor) -> bool:
            plain = not isinstance(target, DTensor) and target.device.type == "cpu" and target.is_contiguous()
            stored = header[key]
            return plain and (target.shape, target.dtype) == (
                torch.Size(stored["shape"]),
                SAFETENSORS_DTYPES.get(stored["dtype"]),
            )

        direct = {key for key, target in table.items() if target.numel() and is_direct(key, target)}
        with ThreadPoolExecutor(READERS) as readers:
            for done in [readers.submit(read, key) for key in direct]:
                done.result()
    return {key: target for key, target in table.items() if key not in direct}


class ShardedReader:
    """Tensors of a torch distributed checkpoint."""

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            check_index(directory)  # torch unpickles this file without looking at what it names
            metadata = dcp.FileSystemReader(directory).read_metadata()
        except Exception as error:
            raise CheckpointError(
                f"{directory}: the index of the sharded checkpoint is unreadable ({error})"
            ) from error
        self.metadata: dict[str, Any] = metadata.state_dict_metadata

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.metadata)

    def layout(self) -> Layout:
        """Shape (of the whole tensor) and type of every tensor."""
        return {name: (entry.size, entry.properties.dtype) for name, entry in self.metadata.items()}

    def fill(self, targets: Table) -> None:
        """Load into the targets, in place; each rank reads only its part."""
        dcp.load(
            {name: t.detach() for name, t in targets.items()},
            checkpoint_id=self.directory,
            no_dist=not torch.distributed.is_initialized(),
        )


def _copy_into(target: torch.Tensor, file: Any, key: str) -> None:
    """Copy from a tensor in an open file; of a sharded target only its own part is read."""
    shape = torch.Size(file.get_slice(key).get_shape())
    if target.shape != shape:
        raise CheckpointError(f"{key}: the checkpoint has shape {tuple(shape)}, the run {tuple(target.shape)}")
    with torch.no_grad():
        if not isinstance(target, DTensor) or not shape:
            (target.to_local() if isinstance(target, DTensor) else target).copy_(file.get_tensor(key))
            return
        sizes, offsets = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        if 0 not in sizes:
            part = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            target.to_local().copy_(file.get_slice(key)[part])


def open_reader(checkpoint: Path) -> tuple["WholeReader | ShardedReader", "WholeReader | ShardedReader | None"]:
    """Readers for the model's tensors (names start with `model.`) and for the optimizer's, if it was saved.

    An unsharded checkpoint of a sharded run has its model whole and its optimizer in shards.
    """
    sharded = ShardedReader(checkpoint / SHARDED_DIR) if (checkpoint / SHARDED_DIR).is_dir() else None
    paths = sorted(checkpoint.glob("model*.safetensors"))
    if sharded is not None:
        return (WholeReader(paths, prefix="model.") if paths else sharded), sharded
    if not paths:
        raise CheckpointError(f"{checkpoint}: holds no weights (model*.safetensors or {SHARDED_DIR}/)")
    # the file's own keys begin with the name of the base model ("model."), so the table's prefix comes on top
    optimizer = checkpoint / OPTIMIZER_FILE
    return WholeReader(paths, prefix="model."), WholeReader([optimizer]) if optimizer.is_file() else None


def restore_model(reader: "WholeReader | ShardedReader", model: nn.Module, *, source: Path) -> None:
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


def restore_optimizer(
    reader: "WholeReader | ShardedReader", model: nn.Module, optimizer: torch.optim.Optimizer, *, source: Path
) -> None:
    """Give every parameter of the optimizer its state back; hyperparameters stay those of this launch.

    Raises:
        CheckpointError: state of unknown parameters, or parameters without any.
    """
    stored = [name for name in reader.names() if name.startswith("optimizer.")]
    if not stored:
        return  # saved before the first step
    layout, targets = reader.layout(), {}
    state: dict[torch.Tensor, dict[str, Any]] = {}
    for name, parameter, group in _named_parameters_of(model, optimizer):
        if not (keys := list(_state_keys(stored, name))):
            raise CheckpointError(
                f"{source}: no optimizer state for {name}; set training.reset_optimizer to start afresh"
            )
        state[parameter] = {}
        for key in keys:
            full_name = f"optimizer.{name}.{key}"
            on_device = bool(key != "step" or group.get("fused") or group.get("capturable"))
            targets[full_name] = state[parameter][key] = _like(parameter, *layout[full_name], on_device=on_device)
    if unknown := sorted(set(stored) - set(targets)):
        raise CheckpointError(f"{source}: optimizer state of unknown parameters: {', '.join(unknown[:5])}")
    reader.fill(targets)
    for values in state.values():
        numbers = {key: value.item() for key, value in values.items() if value.dtype == NUMBER}
        # Some optimizers refuse a counter that is a float; none minds an int.
        values.update({key: int(number) if number.is_integer() else number for key, number in numbers.items()})
    optimizer.state.clear()
    optimizer.state.update(state)


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
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)  # filled before anyone reads it
    return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def read_extra(reader: "WholeReader | ShardedReader") -> Table:
    """Tensors saved as `extra` (all whole), by name."""
    targets = {
        n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in reader.layout().items() if n.startswith("extra.")
    }
    if targets:
        reader.fill(targets)
    return {name.removeprefix("extra."): tensor for name, tensor in targets.items()}


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """JSON of the optimizer's class and groups, for people."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return json.dumps({"class": type(optimizer).__name__, "groups": groups}, default=str, indent=1)
