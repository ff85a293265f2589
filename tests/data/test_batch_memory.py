"""Batches lie where they are needed, and travel small."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from olmo_hf.data.batch_memory import empty_rows
from olmo_hf.data.collator import DataCollator
from olmo_hf.data.instance_batch import PackedBatch
from olmo_hf.data.memmap import MemMapDataset


class Watching:
    """A collator that also tells what it sends from a worker: type, shared or not, and bytes of all tensors."""

    def __init__(self) -> None:
        self.collator = DataCollator(0)

    def __call__(self, items: list) -> Any:
        batch = self.collator(items)
        if isinstance(batch, PackedBatch):
            rows = [batch.tokens, *(v for v in batch.columns.values() if isinstance(v, torch.Tensor) and v.dim() == 2)]
            size_bytes = sum(row.numel() * row.element_size() for row in rows)
            batch.columns["sent"] = [str(batch.tokens.dtype), rows[0].is_shared(), size_bytes]
        return batch


@pytest.fixture
def path(tmp_path: Path) -> str:
    np.arange(80, dtype=np.uint16).tofile(tmp_path / "a.npy")
    (np.arange(80) % 3 > 0).tofile(tmp_path / "mask.bool")
    return str(tmp_path / "a.npy")


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_sends_tokens_and_the_batch_is_made_where_it_arrives(path: str, workers: int, masks: bool) -> None:
    mask_paths = [str(Path(path).with_name("mask.bool"))] if masks else None
    dataset = MemMapDataset([path], sequence_length=8, token_dtype="uint16", label_mask_paths=mask_paths)
    batches = list(DataLoader(dataset, batch_size=5, num_workers=workers, collate_fn=Watching()))
    assert torch.cat([batch["input_ids"] for batch in batches]).flatten().tolist() == list(range(80))
    labels = torch.cat([batch["labels"] for batch in batches]).flatten().tolist()
    assert labels == [-100 if masks and token % 3 == 0 else token for token in range(80)]
    for batch in batches:
        assert type(batch) is dict
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        if workers:
            # 16 bytes a token would be sent as input ids and labels of int64.
            assert batch["sent"] == ["torch.uint16", True, 5 * 8 * (3 if masks else 2)]
        batch["labels"].fill_(-100)
        assert (batch["input_ids"] >= 0).all()


class Wrapping:
    """What looks into a batch inside the worker, as the collators of other libraries do."""

    def __call__(self, items: list) -> dict:
        return {key: value for key, value in DataCollator(0)(items).items() if key != "index"}


def test_a_batch_looked_at_in_the_worker_is_the_same(path: str) -> None:
    dataset = MemMapDataset([path], sequence_length=8, token_dtype="uint16")
    (batch,) = DataLoader(dataset, batch_size=10, num_workers=1, collate_fn=Wrapping())
    assert batch["input_ids"].flatten().tolist() == batch["labels"].flatten().tolist() == list(range(80))


def test_shape_and_type() -> None:
    rows = empty_rows(3, 5, torch.bool)
    assert rows.shape == (3, 5)
    assert rows.dtype == torch.bool
    assert rows.is_contiguous()
