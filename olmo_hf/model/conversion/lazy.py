"""Tensors that are read when they are asked for, and a safetensors file that is written tensor by tensor.

With these a checkpoint of any size is converted in the memory of its largest tensor.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from olmo_hf.model.conversion.mapped import DTYPE_NAMES, places_in_safetensors


@dataclass(frozen=True)
class LazyTensor:
    """A tensor on disk."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """Reads the whole tensor; the caller owns the result only for reading."""

    def map_rows(self, rows: slice) -> "LazyTensor":
        """Some rows of the first axis, which become the whole."""
        count = len(range(*rows.indices(self.shape[0])))
        return LazyTensor((count, *self.shape[1:]), self.dtype, lambda: self.read()[rows])


LazyTable = dict[str, LazyTensor]


def from_memory(tensors: Mapping[str, torch.Tensor]) -> LazyTable:
    """Tensors that are there already, perhaps mapped from a file."""
    return {name: in_memory(tensor) for name, tensor in tensors.items()}


def in_memory(tensor: torch.Tensor) -> LazyTensor:
    """A tensor that is there already."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def from_safetensors(paths: Iterable[Path]) -> LazyTable:
    """All tensors of some safetensors files.

    Raises:
        ConversionError: a file is damaged.
    """
    return {
        name: LazyTensor(place.shape, place.dtype, place.map)
        for path in paths
        for name, place in places_in_safetensors(path).items()
    }


class SafetensorsWriter:
    """Writes one safetensors file in the order of its layout; `write` once per tensor, then leave the `with` block.

    The library's own writer wants all tensors in memory at once. Format: 8 bytes little-endian header length, a JSON
    header with dtype, shape and offsets of each tensor, the bytes.
    """

    def __init__(self, path: Path, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
        self.path, self.pending = path, dict(layout)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, (shape, dtype) in layout.items():
            size_bytes = math.prod(shape) * dtype.itemsize
            offsets = [offset, offset + size_bytes]
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
            offset += size_bytes
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self.file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor."""
        expected, (shape, dtype) = next(iter(self.pending.items()))
        assert (name, tuple(tensor.shape), tensor.dtype) == (expected, shape, dtype), f"{name} is not what comes next"
        del self.pending[name]
        flat = tensor.detach().contiguous().flatten()
        self.file.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.file.close()
        assert kind is not None or not self.pending, f"{self.path}: never written: {list(self.pending)[:3]}"


def write_safetensors(path: Path, table: LazyTable, rename: Callable[[str], str] = str) -> None:
    """Copy a table into one file."""
    layout = {rename(name): (tensor.shape, tensor.dtype) for name, tensor in table.items()}
    with SafetensorsWriter(path, layout) as writer:
        for name, tensor in table.items():
            writer.write(rename(name), tensor.read())


def write_model_files(directory: Path, table: LazyTable, max_shard_bytes: int) -> None:
    """Write `model.safetensors`, or numbered shards and their index as transformers expects them."""
    shards: list[LazyTable] = [{}]
    filled = 0
    for name, tensor in table.items():
        size_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        if filled and filled + size_bytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size_bytes
    if len(shards) == 1:
        write_safetensors(directory / "model.safetensors", table)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / file_name, shard)
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in table.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
