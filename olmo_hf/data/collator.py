"""Instances in, one batch out.

Shapes: `B` instances, `S` tokens of the longest, `D` documents in an instance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.utils.data import get_worker_info

from olmo_hf.data.instance_batch import IGNORE_INDEX, MASK_KEYS, InstanceBatch, PackedBatch, complete_batch

Item = dict[str, Any]


@dataclass(frozen=True)
class DataCollator:
    """Pads instances to one length and derives the labels.

    A batch has `input_ids` (int64, (B, S)) and `labels` (int64, (B, S)), and of the following those that an item
    has: `attention_mask` (float, (B, S)), `attention_bias` ((B, 1, S, S)), `label_mask` (bool, (B, S)), `index` and
    `source` (int64, (B,)), `instance_mask` (bool, (B,)), `doc_lens` (int32, (B, D), padded with 0 on the right
    whatever the direction), `max_doc_lens` (list of B), `metadata` (list of B). Spec: data.md section 9.

    `labels` are the input ids, not shifted, with -100 wherever `label_mask` or `instance_mask` is False,
    `attention_mask` is 0, or the position is padding. The masks they are made of stay in the batch for whoever counts
    or shows them; a model needs only `input_ids`, `labels`, `attention_mask` and `doc_lens`.

    Args:
        pad_token_id: Fills up `input_ids`.
        pad_direction: Side of the padding.
        restart_positions: Adds `position_ids` (int64, (B, S)) that begin at 0 in every document, where there are
            `doc_lens`.
    """

    pad_token_id: int
    pad_direction: Literal["left", "right"] = "right"
    restart_positions: bool = False

    def __call__(self, items: Sequence[Item | torch.Tensor]) -> Mapping[str, Any]:
        if isinstance(items, InstanceBatch):
            columns = self._columns(items)
            # What a worker sends should be small; it is completed where it arrives.
            finish = complete_batch if get_worker_info() is None else PackedBatch
            return finish(items.tokens, columns)
        return self._from_items(items)

    def _columns(self, items: InstanceBatch) -> dict[str, Any]:
        """The columns of instances that were read together, as a batch has them."""
        columns = dict(items.columns)
        for key in ("index", "source"):
            if key in columns:
                columns[key] = torch.as_tensor(columns[key])
        if "instance_mask" in columns:
            columns["instance_mask"] = torch.tensor(columns["instance_mask"], dtype=torch.bool)
        if "attention_mask" in columns:
            columns["attention_mask"] = columns["attention_mask"].float()
        if "doc_lens" in columns:
            columns["max_doc_lens"] = [int(lengths.max()) for lengths in columns["doc_lens"]]
            columns["doc_lens"] = _pad_doc_lens(columns["doc_lens"])
            if self.restart_positions:
                columns["position_ids"] = document_positions(columns["doc_lens"], items.tokens.shape[1])
        return columns

    def _from_items(self, items: Sequence[Item | torch.Tensor]) -> dict[str, Any]:
        """A batch of items that may be of unequal length, have other columns, or be bare tensors."""
        rows: list[Item] = [item if isinstance(item, dict) else {"input_ids": item} for item in items]
        lengths = [_length(row["input_ids"]) for row in rows]
        length = max(lengths)
        present = {key for row in rows for key in row}
        batch: dict[str, Any] = {}

        def take(key: str, make: Callable[[list[Any]], Any]) -> None:
            if key not in present:
                return
            values = [row[key] for row in rows if row.get(key) is not None]
            if values:
                batch[key] = make(values)

        take("input_ids", lambda values: self._pad(values, length, torch.int64, self.pad_token_id))
        take("attention_mask", lambda values: self._pad(values, length, torch.float, 0.0))
        take("attention_bias", lambda values: torch.stack([self._pad_bias(v, length) for v in values]))
        take("label_mask", lambda values: self._pad(values, length, torch.bool, False))
        take("index", torch.tensor)
        take("source", torch.tensor)
        take("instance_mask", lambda values: torch.tensor(values, dtype=torch.bool))
        if "doc_lens" in present:
            batch["max_doc_lens"] = [int(max(row["doc_lens"])) for row in rows if row.get("doc_lens") is not None]
        take("doc_lens", _pad_doc_lens)
        if self.restart_positions and "doc_lens" in batch:
            batch["position_ids"] = document_positions(batch["doc_lens"], length)
        take("metadata", list)
        batch["labels"] = self._labels(rows, batch, lengths)
        return batch

    def _labels(self, rows: list[Item], batch: dict[str, Any], lengths: list[int]) -> torch.Tensor:
        """Input ids, unshifted, with -100 at everything that is not trained on, (B, S)."""
        labels = batch["input_ids"].clone()
        for number, missing in enumerate(max(lengths) - length for length in lengths):
            if missing:
                padding = slice(None, missing) if self.pad_direction == "left" else slice(-missing, None)
                labels[number, padding] = IGNORE_INDEX
        for key in MASK_KEYS:
            having = [number for number, row in enumerate(rows) if row.get(key) is not None]
            if having:
                ignored = batch[key] == 0  # (rows that have it, S) or (rows that have it,)
                ignored = ignored[:, None] if key == "instance_mask" else ignored
                labels[having] = labels[having].masked_fill(ignored, IGNORE_INDEX)
        return labels

    def _sides(self, missing: int) -> tuple[int, int]:
        return (missing, 0) if self.pad_direction == "left" else (0, missing)

    def _pad(self, values: list[Any], length: int, dtype: torch.dtype, fill: float) -> torch.Tensor:
        """Stacks rows of unequal length, (B, S)."""
        rows = [torch.as_tensor(value).to(dtype) for value in values]
        return torch.stack([F.pad(row, self._sides(length - len(row)), value=fill) for row in rows])

    def _pad_bias(self, bias: Any, length: int) -> torch.Tensor:
        """An attention bias as (1, S, S); padding is False or minus infinity."""
        bias = torch.as_tensor(bias)
        size = bias.shape[-1]
        fill = False if bias.dtype == torch.bool else float("-inf")
        return F.pad(bias.reshape(1, size, size), self._sides(length - size) * 2, value=fill)


def _length(values: Any) -> int:
    # `len` of a tensor takes as long as the rest of the collator together.
    return values.shape[0] if isinstance(values, torch.Tensor) else len(values)


def _pad_doc_lens(values: list[Any]) -> torch.Tensor:
    """Document lengths, (B, D). Zeros behind, never before: they end no document."""
    rows = [torch.as_tensor(value) for value in values]
    most = max(len(row) for row in rows)
    return torch.stack([F.pad(row, (0, most - len(row)), value=0) for row in rows])


def document_positions(doc_lens: torch.Tensor, length: int) -> torch.Tensor:
    """Position of every token in its document, (B, S), from document lengths, (B, D), that add up to S in each row."""
    starts = doc_lens.cumsum(1) - doc_lens  # (B, D)
    first = [torch.repeat_interleave(s, d, output_size=length) for s, d in zip(starts, doc_lens, strict=True)]
    return torch.arange(length) - torch.stack(first)
