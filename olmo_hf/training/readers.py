"""Reading the tensors of a checkpoint straight to where they belong, whole or in shards."""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from olmo_hf.errors import CheckpointError
from olmo_hf.model.conversion.safe_load import check_index
from olmo_hf.training.tensors import OPTIMIZER_FILE, SHARDED_DIR, Table

READERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that read a file of whole tensors; more than there are cores only hinder each other."""

Layout = dict[str, tuple[torch.Size, torch.dtype]]
"""Shape (of the whole tensor) and type, by name."""

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


Reader = WholeReader | ShardedReader


def open_reader(checkpoint: Path) -> tuple[Reader, Reader | None]:
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
