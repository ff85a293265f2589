"""Tensors mapped from files one by one, so that a file may be larger than the memory of the machine.

Linux refuses a private mapping that is larger than all memory, and torch and safetensors map whole files that way.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from olmo_hf.errors import ConversionError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
MOST_HEADER_BYTES = 100_000_000
"""The safetensors library, too, reads no longer header."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a file."""

    path: Path
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def map(self) -> torch.Tensor:
        """The tensor; pages are read when they are touched, and writing to it does not change the file."""
        if self.size_bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        content = map_bytes(self.path, self.offset_bytes, self.size_bytes)
        if self.offset_bytes % self.dtype.itemsize:  # a mapping begins at a page, so this is its alignment in memory
            content = content.clone()
        return content.view(self.dtype).view(self.shape)


def map_bytes(path: Path, offset_bytes: int, size_bytes: int) -> torch.Tensor:
    """A stretch of a file as uint8 (size_bytes,)."""
    return torch.from_numpy(np.memmap(path, np.uint8, mode="c", offset=offset_bytes, shape=(size_bytes,)))


def places_in_safetensors(path: Path) -> dict[str, Place]:
    """Every tensor of a safetensors file, in the order of the header, after the checks of the library.

    Raises:
        ConversionError: the file is damaged.
    """
    try:
        file_bytes = path.stat().st_size
        with open(path, "rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or header_bytes > min(MOST_HEADER_BYTES, file_bytes - 8):
                raise ValueError(f"a header of {header_bytes:,} bytes in a file of {file_bytes:,}")
            header = json.loads(file.read(header_bytes))
        return _places(path, header, 8 + header_bytes, file_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{path}: is no readable safetensors file ({error}); copy it again") from error


def _places(path: Path, header: dict[str, Any], start: int, file_bytes: int) -> dict[str, Place]:
    places, ends = {}, {0: 0}  # offsets at which a tensor begins and where it ends
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} is of type {entry['dtype']}, expected one of {', '.join(_DTYPES)}")
        (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
        if not all(type(number) is int for number in (begin, end, *shape)):
            raise ValueError(f"{name} has shape {shape} and offsets {begin}, {end}, expected whole numbers")
        place = Place(path, start + begin, shape, _DTYPES[entry["dtype"]])
        if min(place.shape, default=0) < 0 or end - begin != place.size_bytes:
            raise ValueError(f"{name} has shape {place.shape} but {end - begin:,} bytes")
        places[name] = place
        if end > begin:
            if ends.get(begin, begin) != begin:
                raise ValueError(f"{name} overlaps with another tensor")
            ends[begin] = end
    reached = 0
    while ends.get(reached, reached) > reached:
        reached = ends.pop(reached)
    if start + reached != file_bytes or any(begin != end for begin, end in ends.items()):
        raise ValueError(f"its tensors fill {start + reached:,} bytes without a gap, but the file has {file_bytes:,}")
    return places


def load_torch_file_in_pieces(path: Path) -> Any:
    """`torch.load(weights_only=True)`, but every storage is a mapping of its own."""
    with FakeTensorMode():  # reads everything but the numbers, and notes where they lie
        content = torch.load(path, map_location="cpu", weights_only=True)
    return _with_numbers(content, path, {})


def _with_numbers(value: Any, path: Path, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, FakeTensor):
        hollow: Any = value.untyped_storage()
        offset = hollow._checkpoint_offset
        if offset not in storages:
            size = hollow.nbytes()
            storages[offset] = (map_bytes(path, offset, size) if size else torch.empty(0)).untyped_storage()
        filled = torch.empty(0, dtype=value.dtype)
        filled.set_(storages[offset], value.storage_offset(), value.shape, value.stride())
        return filled
    if isinstance(value, dict):
        return {key: _with_numbers(inner, path, storages) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_numbers(inner, path, storages) for inner in value)
    return value
