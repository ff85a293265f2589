"""Tensors of sharded checkpoints, put together one at a time: torch distributed ones and two older kinds."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.lazy import LazyTable, LazyTensor, in_memory
from olmo_hf.model.conversion.safe_load import (
    Record,
    ShardedTensorRecord,
    load_checkpoint_index,
    load_torch_file,
    read_tensor,
)

_WRAPPER = "_fsdp_wrapped_module."


@dataclass(frozen=True)
class _Chunk:
    """A block of a tensor: where it lies in the tensor, and in which file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int

    def read(self) -> torch.Tensor:
        tensor = read_tensor(self.path, self.start, self.length)
        if tuple(tensor.shape) != self.sizes:
            raise ConversionError(
                f"{self.path}: found shape {tuple(tensor.shape)} at byte {self.start}, expected {self.sizes}; copy "
                "it again"
            )
        return tensor


def from_distributed_checkpoint(directory: Path) -> LazyTable:
    """Tensors of a torch distributed checkpoint (a `.metadata` index and `.distcp` files), by full name.

    Raises:
        ConversionError: the index is unreadable, or parts are missing.
    """
    index = load_checkpoint_index(directory / ".metadata")
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    for key, info in index["storage_data"].items():
        offset = key.state.get("offset")
        places[(key["fqn"], () if offset is None else tuple(offset))] = info
    table: LazyTable = {}
    for name, entry in index["state_dict_metadata"].items():
        if not isinstance(entry.state, dict) or "chunks" not in entry.state:
            continue  # a plain Python value
        chunks = []
        for chunk in entry["chunks"]:
            offsets, sizes = tuple(chunk["offsets"]), tuple(chunk["sizes"])
            info = places.get((name, offsets))
            # A part lies beside the index: a path that leads elsewhere is none.
            name_only = info is not None and Path(info["relative_path"]).name == str(info["relative_path"])
            if info is None or not name_only or not (directory / info["relative_path"]).is_file():
                raise ConversionError(
                    f"{directory}: the part of {name} at {offsets} is missing; copy the files of all ranks"
                )
            path = directory / info["relative_path"]
            chunks.append(_Chunk(offsets, sizes, path, info["offset"], info["length"]))
        shape, dtype = tuple(entry["size"]), _dtype_of(entry["properties"])
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
            raise ConversionError(
                f"{directory}: the parts of {name} do not add up to {shape}; copy the files of all ranks"
            )
        table[name] = LazyTensor(shape, dtype, partial(_join, shape, dtype, chunks))
    return table


def _dtype_of(properties: Record) -> torch.dtype:
    state = properties.state
    return state["dtype"] if isinstance(state, dict) else state[0]


def _join(shape: tuple[int, ...], dtype: torch.dtype, chunks: list[_Chunk]) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for chunk in chunks:
        where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[where] = chunk.read()
    return whole


def rank_files(directory: Path) -> list[Path]:
    """`rank0.pt`, `rank1.pt`, ... in the order of ranks.

    Raises:
        ConversionError: a rank is missing.
    """
    found = {
        int(match[1]): path for path in directory.glob("rank*.pt") if (match := re.fullmatch(r"rank(\d+)", path.stem))
    }
    if sorted(found) != list(range(len(found))) or not found:
        raise ConversionError(
            f"{directory}: expected rank0.pt, rank1.pt, ... without gaps, found ranks {sorted(found)}"
        )
    return [found[rank] for rank in sorted(found)]


def from_rank_states(states: Sequence[Mapping[str, Any]]) -> LazyTable:
    """Tensors of which every rank holds shards (`torch_legacy`); whole tensors are taken from rank 0."""
    table: LazyTable = {}
    for name, value in states[0].items():
        if isinstance(value, ShardedTensorRecord):
            table[name] = _sharded(name, [state[name] for state in states])
        elif isinstance(value, torch.Tensor):
            table[name] = in_memory(value)
    return table


def _sharded(name: str, records: list[ShardedTensorRecord]) -> LazyTensor:
    metadata = records[0].pickled_state[1]
    shape = tuple(metadata["size"])
    shards = [shard for record in records for shard in record.pickled_state[0]]
    if sum(shard["tensor"].numel() for shard in shards) != math.prod(shape):
        raise ConversionError(
            f"{name}: the shards of {len(records)} ranks do not add up to {shape}; copy the files of all ranks"
        )
    dtype = shards[0]["tensor"].dtype

    def read() -> torch.Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for shard in shards:
            offsets = shard["metadata"]["shard_offsets"]
            where = tuple(slice(o, o + n) for o, n in zip(offsets, shard["tensor"].shape, strict=True))
            whole[where] = shard["tensor"]
        return whole

    return LazyTensor(shape, dtype, read)


def from_flat_parameters(paths: list[Path]) -> LazyTable:
    """Weights of a `local` checkpoint: every rank's slice of FSDP's flat parameters."""
    ranks = [load_torch_file(path) for path in paths]
    table: LazyTable = {}
    for position, module in enumerate(ranks[0]["modules"]):
        prefix = (module["name"] + ".").replace(_WRAPPER, "").lstrip(".")
        for number, handle in enumerate(module["handles"]):
            handles = [rank["modules"][position]["handles"][number] for rank in ranks]
            for place, name in enumerate(handle["flat_param._fqns"]):
                shape = tuple(handle["flat_param._shapes"][place])
                pieces = [_flat_piece(part, place) for part in handles]
                full_name = prefix + name.replace(_WRAPPER, "")
                table[full_name] = _from_pieces(full_name, shape, [p for p in pieces if p is not None])
    return table


def _flat_piece(handle: Mapping[str, Any], place: int) -> torch.Tensor | None:
    in_shard, offset, count, _, _ = handle["flat_param._shard_param_infos"][place].args
    return handle["flat_param.data"][offset : offset + count] if in_shard else None


def flat_optimizer_state(
    paths: list[Path], shapes: Mapping[str, tuple[int, ...]], names: Mapping[int, str]
) -> LazyTable:
    """Optimizer state of a `local` checkpoint as `{parameter}.{key}`; every rank holds flat slices."""
    states = [load_torch_file(path)["state"] for path in paths]
    table: LazyTable = {}
    for number, name in names.items():
        holders = [state[number] for state in states if state.get(number)]
        for key in holders[0] if holders else ():
            pieces = [holder[key] for holder in holders]
            if pieces[0].ndim == 0:
                table[f"{name}.{key}"] = in_memory(pieces[0])
            else:
                table[f"{name}.{key}"] = _from_pieces(f"{name}.{key}", shapes[name], pieces)
    return table


def _from_pieces(name: str, shape: tuple[int, ...], pieces: Iterable[torch.Tensor]) -> LazyTensor:
    kept = list(pieces)
    if sum(piece.numel() for piece in kept) != math.prod(shape):
        raise ConversionError(f"{name}: the slices of the ranks do not add up to {shape}; copy the files of all ranks")
    return LazyTensor(shape, kept[0].dtype, lambda: torch.cat([piece.flatten() for piece in kept]).view(shape))
