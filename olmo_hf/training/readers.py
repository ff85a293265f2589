"""Reading the tensors of a checkpoint straight to where they belong, whole or in shards."""

import dataclasses
import io
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from olmo_hf.errors import CheckpointError
from olmo_hf.model.conversion.safe_load import check_index
from olmo_hf.training.checked_files import CheckedFiles
from olmo_hf.training.settling import BLOCK_BYTES
from olmo_hf.training.tensors import OPTIMIZER_FILE, SHARDED_DIR, Table, failures_of_torch
from olmo_hf.training.turns import own_turn

READERS = min(4, len(os.sched_getaffinity(0)))
"""Threads that read files of whole tensors, one each; more than there are cores only hinder each other."""

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
    """Tensors of safetensors files.

    Args:
        files: each with what stands before its own names here.
    """

    def __init__(self, files: Mapping[Path, str]):
        self.where: dict[str, Path] = {}
        self._prefixes = dict(files)
        for path, prefix in files.items():
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                    self.where[prefix + key] = path

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.where)

    def fill(self, targets: Table, files: CheckedFiles) -> None:
        """Copy into the targets, in place; a sharded target takes its part."""
        by_file: dict[Path, Table] = {}
        for name, target in targets.items():
            path = self.where[name]
            by_file.setdefault(path, {})[name.removeprefix(self._prefixes[path])] = target
        with ThreadPoolExecutor(READERS) as readers:
            for done in [readers.submit(read_file, path, table, files) for path, table in by_file.items()]:
                done.result()

    def layout(self) -> Layout:
        """Shape and type of every tensor."""
        found = {}
        for path, prefix in self._prefixes.items():
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    part = file.get_slice(key)
                    found[prefix + key] = (torch.Size(part.get_shape()), SAFETENSORS_DTYPES[part.get_dtype()])
        return found


def read_file(path: Path, table: Table, files: CheckedFiles) -> None:
    """Read tensors of a safetensors file; where that is all of it, from end to end and without memory of its own.

    Args:
        path: the file.
        table: where its tensors go, by their names in the file.
        files: is told what was read.

    Raises:
        CheckpointError: the file ends too early, or its content is not what it was.
    """
    with open(path, "rb", buffering=0) as file:
        start = file.read(8)
        start += file.read(int.from_bytes(start, "little"))
        header: dict[str, Any] = json.loads(start[8:])
        header.pop("__metadata__", None)
        if header.keys() <= table.keys() and all(_is_streamed(table[key]) for key in header):
            digest = xxhash.xxh3_128(start)
            for key in sorted(header, key=lambda key: header[key]["data_offsets"]):
                _read_next(file, table[key], digest, f"{path}: ends inside {key}")
            files.read_whole(path, digest.hexdigest())
            return
    files.read_in_part(path)
    with safe_open(path, framework="pt") as opened:
        for key, target in table.items():
            _copy_into(target, opened, key)


def _is_streamed(target: torch.Tensor) -> bool:
    """Whether bytes of a file can be put one after another into a tensor."""
    return not isinstance(target, DTensor) and target.is_contiguous()


def _read_next(file: io.FileIO, target: torch.Tensor, digest: Any, ends: str) -> None:
    """Read the file's next tensor in pieces that the processor's own memory still holds when they are summed up."""
    flat = target.detach().reshape(-1).view(torch.uint8)
    on_cpu = flat.device.type == "cpu"
    buffer = flat if on_cpu else torch.empty(min(BLOCK_BYTES, flat.numel()), dtype=torch.uint8)
    memory, done = buffer.numpy().data, 0
    while done < flat.numel():
        piece = memory[done : done + BLOCK_BYTES] if on_cpu else memory[: flat.numel() - done]
        count = file.readinto(piece)
        if not count:
            raise CheckpointError(ends)
        digest.update(piece[:count])
        if not on_cpu:
            flat[done : done + count].copy_(buffer[:count])
        done += count


class ShardedReader:
    """Tensors of a torch distributed checkpoint."""

    def __init__(self, directory: Path):
        self.directory = directory
        try:
            check_index(directory)  # torch unpickles this file without looking at what it names
            metadata = dcp.FileSystemReader(directory).read_metadata()
        except Exception as error:
            raise CheckpointError(
                f"{directory}: the index of the sharded checkpoint is unreadable ({error}); choose another checkpoint"
            ) from error
        self.metadata: dict[str, Any] = metadata.state_dict_metadata

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self.metadata)

    def layout(self) -> Layout:
        """Shape (of the whole tensor) and type of every tensor."""
        return {name: (entry.size, entry.properties.dtype) for name, entry in self.metadata.items()}

    def fill(self, targets: Table, files: CheckedFiles) -> None:
        """Load into the targets, in place; each rank reads only its part."""
        with failures_of_torch():
            dcp.load(
                {name: t.detach() for name, t in targets.items()},
                storage_reader=StreamingReader(self.directory, files),
                no_dist=not torch.distributed.is_initialized(),
            )


class StreamingReader(dcp.FileSystemReader):
    """Identical to torch's, except that files are read from front to back, and summed up on the way."""

    def __init__(self, directory: Path, files: CheckedFiles):
        super().__init__(directory)
        self._files = files
        self._read: dict[str, tuple[Any, int]] = {}
        """By file: the sum of its bytes up to where it was read without a gap, and where that is."""

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        """Identical to torch's except for the order, and for taking turns where memory is short."""

        def place(item: Any) -> tuple[str, int]:
            info = self.storage_data[item.storage_index]
            return info.relative_path, info.offset

        self._read = {}
        ordered = dataclasses.replace(plan, items=sorted(plan.items, key=place))
        largest = max((self.storage_data[item.storage_index].length for item in plan.items), default=0)
        with own_turn(2 * largest):  # what was read, and the tensor that is made of it
            done = super().read_data(ordered, planner)
        for name, (digest, end) in self._read.items():
            path = Path(self.path) / name
            if end == path.stat().st_size:
                self._files.read_whole(path, digest.hexdigest())
            else:
                self._files.read_in_part(path)
        return done

    def _slice_file(self, file: Any, sinfo: Any) -> io.BytesIO:
        file.seek(sinfo.offset)
        part = file.read(sinfo.length)
        digest, end = self._read.setdefault(sinfo.relative_path, (xxhash.xxh3_128(), 0))
        if sinfo.offset == end:
            digest.update(part)
            self._read[sinfo.relative_path] = digest, end + len(part)
        return io.BytesIO(part)


def _copy_into(target: torch.Tensor, file: Any, key: str) -> None:
    """Copy from a tensor in an open file; of a sharded target only its own part is read."""
    shape = torch.Size(file.get_slice(key).get_shape())
    if target.shape != shape:
        raise CheckpointError(
            f"{key}: the checkpoint has shape {tuple(shape)}, the run {tuple(target.shape)}; choose a checkpoint of "
            "this model"
        )
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

    They are one where all tensors lie in files of one kind. An unsharded checkpoint of a sharded run has its model
    whole and its optimizer in shards.
    """
    # a file's own names begin with the name of the base model ("model."), so the table's prefix comes on top
    models = dict.fromkeys(sorted(checkpoint.glob("model*.safetensors")), "model.")
    if (checkpoint / SHARDED_DIR).is_dir():
        sharded = ShardedReader(checkpoint / SHARDED_DIR)
        return (WholeReader(models) if models else sharded), sharded
    if not models:
        raise CheckpointError(
            f"{checkpoint}: holds no weights (model*.safetensors or {SHARDED_DIR}/); choose another checkpoint"
        )
    optimizer = checkpoint / OPTIMIZER_FILE
    if not optimizer.is_file():
        return WholeReader(models), None
    both = WholeReader(models | {optimizer: ""})
    return both, both
