"""Reading files that are pickles without running anything that is in them.

Three of the original's formats need more than `torch.load(weights_only=True)` knows: the index of a torch distributed
checkpoint, checkpoints of FSDP's first version, and safetensors files whose tensor names are pickled tuples. Each has
its list of classes; every one is replaced by an inert stand-in that keeps the data, and anything else is refused.
"""

import base64
import io
import pickle
from pathlib import Path
from typing import Any

import torch

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.mapped import load_torch_file_in_pieces


class Record:
    """Stands in for a class of a pickle: keeps what the class would have been given, and does nothing."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> "Record":
        record = object.__new__(cls)
        record.args = args
        return record

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        """An attribute of the object that was pickled."""
        state = self.state
        if isinstance(state, tuple):  # (attributes, slots)
            state = {**(state[0] or {}), **(state[1] or {})}
        return state[name]

    def __hash__(self) -> int:
        return id(self)  # records serve as keys of mappings that are only ever listed


class ShardedTensorRecord(torch.Tensor):
    """A sharded tensor of FSDP's first version: torch makes an empty shell of it, which keeps what this rank held."""

    pickled_state: Any

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func}: a shell without data takes part in no computation")

    def __setstate__(self, state: Any) -> None:
        self.pickled_state = state


class SizeRecord(tuple[Any, ...]):
    """`torch.Size`; a plain tuple here."""


def _nested_class(owner: Any, name: str) -> Any:
    """Stands in for `getattr` in a pickle, which old protocols use for nested classes; gives nothing real away."""
    return Record


_SHARDED = "torch.distributed._shard."
# What a `torch_legacy` or `local` checkpoint of the original may name, beyond what torch itself trusts.
_TORCH_FILE_GLOBALS: list[Any] = [
    (_nested_class, "__builtin__.getattr"),
    (_nested_class, "builtins.getattr"),
    (Record, "torch.serialization._get_layout"),
    (Record, "torch.distributed.remote_device._remote_device"),
    (Record, "torch.distributed.fsdp._flat_param._ShardParamInfo"),
    (Record, "torch.distributed.fsdp.flat_param._ShardParamInfo"),
    (ShardedTensorRecord, _SHARDED + "sharded_tensor.api.ShardedTensor"),
    (Record, _SHARDED + "metadata.ShardMetadata"),
    (Record, _SHARDED + "sharded_tensor.metadata.MEM_FORMAT_ENCODING"),
    (Record, _SHARDED + "sharded_tensor.metadata.ShardedTensorMetadata"),
    (Record, _SHARDED + "sharded_tensor.metadata.TensorProperties"),
    (Record, _SHARDED + "sharded_tensor.shard.Shard"),
    (Record, _SHARDED + "sharding_spec.chunk_sharding_spec.ChunkShardingSpec"),
    # Random states and paths in the trainer's state.
    (Record, "_codecs.encode"),
    (Record, "numpy.core.multiarray._reconstruct"),
    (Record, "numpy._core.multiarray._reconstruct"),
    (Record, "numpy.ndarray"),
    (Record, "numpy.dtype"),
    (Record, "pathlib.PosixPath"),
    (Record, "pathlib._local.PosixPath"),
]


def load_torch_file(path: Path) -> Any:
    """A `.pt` file; tensors are mapped into memory, not read, where the file allows it.

    Raises:
        ConversionError: not such a file, or one that names something outside the list.
    """
    try:
        with torch.serialization.safe_globals(_TORCH_FILE_GLOBALS):
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "annot allocate memory" in str(error):  # larger than the machine's memory, so nothing maps it whole
                    return load_torch_file_in_pieces(path)
                # Written in torch's old format, which cannot be mapped.
                return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConversionError(
            f"{path}: cannot be read safely ({error}); copy it again from where you trust it"
        ) from error


def read_tensor(path: Path, start: int, length: int) -> torch.Tensor:
    """A tensor that `torch.save` wrote into a part of a file, as in a torch distributed checkpoint.

    Raises:
        ConversionError: there is none.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start)
            content = io.BytesIO(file.read(length))
        tensor = torch.load(content, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConversionError(f"{path}: is damaged at byte {start} ({error}); copy it again") from error
    if not isinstance(tensor, torch.Tensor):
        raise ConversionError(
            f"{path}: found a {type(tensor).__name__} at byte {start}, expected a tensor; copy it again"
        )
    return tensor


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, allowed: dict[str, Any]):
        super().__init__(file)
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no business here")
        return self.allowed[f"{module}.{name}"]


_CHECKPOINT = "torch.distributed.checkpoint."
_INDEX_GLOBALS: dict[str, Any] = {
    "torch.Size": SizeRecord,
    "torch.serialization._get_layout": Record,
    "pathlib.PosixPath": Record,
    "pathlib._local.PosixPath": Record,
    "collections.OrderedDict": dict,
    **{
        f"{_CHECKPOINT}metadata.{name}": Record
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    },
    f"{_CHECKPOINT}filesystem._StorageInfo": Record,
    f"{_CHECKPOINT}filesystem._StoragePrefix": Record,
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": Record,
    **{
        f"torch.{dtype}".replace("torch.torch.", "torch."): dtype
        for dtype in (
            torch.float64,
            torch.float32,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.int32,
            torch.uint8,
            torch.bool,
        )
    },
}


def load_checkpoint_index(path: Path) -> Record:
    """The `.metadata` file of a torch distributed checkpoint.

    Raises:
        ConversionError: not such a file, or one that names something outside the list.
    """
    try:
        with open(path, "rb") as file:
            return _RestrictedUnpickler(file, _INDEX_GLOBALS).load()
    except (pickle.UnpicklingError, EOFError, OSError, AttributeError, IndexError) as error:
        raise ConversionError(
            f"{path}: the index cannot be read safely ({error}); copy it again from where you trust it"
        ) from error


def check_index(directory: Path) -> None:
    """Refuse a torch distributed checkpoint whose `.metadata` names anything but the classes of such an index.

    torch itself unpickles that file without looking; call this first. The file is read, nothing in it is run.

    Raises:
        ConversionError: it names something else, or is no such file.
    """
    load_checkpoint_index(directory / ".metadata")


def decode_tensor_name(key: str) -> tuple[tuple[Any, ...], bool]:
    """A tensor name of the original's safetensors files: base64 of a pickled (path, value is pickled).

    Raises:
        ConversionError: the pickle holds anything but tuples of plain values.
    """
    try:
        decoded = base64.urlsafe_b64decode(key.encode("ascii"))
        path, is_pickled = _RestrictedUnpickler(io.BytesIO(decoded), {}).load()
    except (pickle.UnpicklingError, ValueError, EOFError, TypeError, AttributeError, IndexError) as error:
        raise ConversionError(f"tensor name {key[:60]!r} cannot be read safely: {error}") from error
    return tuple(path), bool(is_pickled)


def encode_tensor_name(path: tuple[str, ...], *, is_pickled: bool = False) -> str:
    """The inverse of `decode_tensor_name`."""
    return base64.urlsafe_b64encode(pickle.dumps((path, is_pickled), protocol=4)).decode("ascii")


def encode_value(value: Any) -> torch.Tensor:
    """A value that is no tensor, as the original puts it among tensors: the bytes of its pickle."""
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=4)), dtype=torch.uint8)
