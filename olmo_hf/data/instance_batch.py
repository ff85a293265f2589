"""Many instances in the form in which they are read, sent between processes and completed to a batch.

Shapes: `B` instances, `S` tokens of each, `D` documents in an instance.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

IGNORE_INDEX = -100
"""Label that no loss counts."""

MASK_KEYS = ("label_mask", "attention_mask", "instance_mask")
"""Columns that are 0 where nothing is learned."""


class InstanceBatch(Sequence[dict[str, Any]]):
    """Instances of one length, read together: a sequence of items for whoever wants items, whole for the collator.

    Args:
        tokens: Token ids in the type they have on disk, (B, S).
        columns: Whatever else the items have: for each key one value per item, a tensor (B, ...) or a list.
    """

    def __init__(self, tokens: torch.Tensor, columns: dict[str, Any]):
        self.tokens = tokens
        self.columns = columns
        self._input_ids: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        if not -len(self) <= number < len(self):
            raise IndexError(f"item {number} of {len(self)}")
        if self._input_ids is None:
            self._input_ids = self.tokens.to(torch.int64)  # (B, S)
        return {
            "input_ids": self._input_ids[number],
            **{key: values[number] for key, values in self.columns.items()},
        }


def complete_batch(tokens: torch.Tensor, columns: dict[str, Any]) -> dict[str, Any]:
    """A batch: input ids (int64, (B, S)), the finished columns, and labels (int64, (B, S)).

    Labels are the input ids, not shifted, with -100 wherever one of the masks among the columns is 0.
    """
    input_ids = tokens.to(torch.int64)
    labels = input_ids.clone()
    for key in MASK_KEYS:
        if key in columns:
            ignored = columns[key] == 0  # (B, S) or (B,)
            labels.masked_fill_(ignored[:, None] if ignored.dim() == 1 else ignored, IGNORE_INDEX)
    return {"input_ids": input_ids, **columns, "labels": labels}


class PackedBatch(Mapping[str, Any]):
    """A batch on its way from a worker: two or four bytes a token instead of sixteen.

    It is pickled as its tokens and columns and comes out as the completed dictionary, so whoever reads from a
    `DataLoader` never meets one. Looked at in the worker itself, it is that dictionary too.

    The tokens travel through the pipe as plain bytes, not as tensors: handing a tensor over in shared memory takes a
    connection between the processes for each, longer than copying a micro-batch, and needs room in `/dev/shm`.
    """

    def __init__(self, tokens: torch.Tensor, columns: dict[str, Any]):
        self.tokens = tokens
        self.columns = columns
        self._complete: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        columns = {
            key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in self.columns.items()
        }
        return _arrived_batch, (self.tokens.numpy(), columns)

    @property
    def _batch(self) -> dict[str, Any]:
        if self._complete is None:
            self._complete = complete_batch(self.tokens, self.columns)
        return self._complete

    def __getitem__(self, key: str) -> Any:
        return self._batch[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch)

    def __len__(self) -> int:
        return len(self._batch)


def _arrived_batch(tokens: np.ndarray, columns: dict[str, Any]) -> dict[str, Any]:
    """A batch from what a worker sent."""
    tensors = {k: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for k, value in columns.items()}
    return complete_batch(torch.from_numpy(tokens), tensors)
