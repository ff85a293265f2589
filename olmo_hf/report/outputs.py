"""Two files of module inputs and outputs (`callbacks.model_outputs`), compared tensor by tensor."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from olmo_hf.errors import DataError


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor of one file differs from that of the other."""

    name: str
    largest: float
    """Largest absolute difference; NaN where only one holds no number."""

    scale: float
    """Largest absolute value in the first file, of those that are numbers."""

    note: str = ""
    """What keeps them from being compared: shapes, or a tensor that only one file has."""

    @property
    def is_equal(self) -> bool:
        """Whether they are the same numbers."""
        return not self.note and self.largest == 0


def compare_outputs(first: Path, second: Path) -> list[TensorDifference]:
    """Every tensor of either file, in the order in which the first run computed them.

    Raises:
        DataError: a file cannot be read as one of these.
    """
    one, other = _read(first), _read(second)
    found = [_difference(name, tensor, other.get(name)) for name, tensor in one.items()]
    return found + [TensorDifference(name, 0.0, 0.0, "only in the second") for name in other if name not in one]


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return {name: file.get_tensor(name) for name in json.loads(metadata["order"])}
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(
            f"{path}: is no file of module outputs ({error}); give RUN/model-outputs/stepN.safetensors, which "
            "`callbacks.model_outputs` writes"
        ) from error


def _difference(name: str, one: torch.Tensor, other: torch.Tensor | None) -> TensorDifference:
    scale = float(one.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    if other is None:
        return TensorDifference(name, 0.0, scale, "only in the first")
    if one.shape != other.shape:
        return TensorDifference(name, 0.0, scale, f"shapes {tuple(one.shape)} and {tuple(other.shape)}")
    note = "" if one.dtype == other.dtype else f"types {one.dtype} and {other.dtype}"
    a, b = one.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return TensorDifference(name, float((a - b).abs().where(~same, 0.0).max()) if a.numel() else 0.0, scale, note)
