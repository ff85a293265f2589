"""Batches lie where they are needed."""

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from olmo_hf.data.batch_memory import empty_rows
from olmo_hf.data.collator import DataCollator
from olmo_hf.data.memmap import MemMapDataset


class Watching:
    """A collator that also tells whether its batch is shared already before the loader sends it."""

    def __init__(self) -> None:
        self.collator = DataCollator(0)

    def __call__(self, items: list) -> dict:
        batch = self.collator(items)
        return {**batch, "shared": [batch["input_ids"].is_shared(), batch["labels"].is_shared()]}


def test_rows_are_shared_in_a_worker_only(tmp_path: Path) -> None:
    np.arange(80, dtype=np.uint16).tofile(tmp_path / "a.npy")
    dataset = MemMapDataset([str(tmp_path / "a.npy")], sequence_length=8, token_dtype="uint16")
    for workers in (0, 2):
        batches = list(DataLoader(dataset, batch_size=5, num_workers=workers, collate_fn=Watching()))
        assert [batch["shared"] for batch in batches] == [[workers > 0] * 2] * 2
        assert torch.cat([batch["input_ids"] for batch in batches]).flatten().tolist() == list(range(80))
        for batch in batches:
            # Labels are memory of their own: whoever changes them leaves the input as it is.
            batch["labels"].fill_(-100)
            assert (batch["input_ids"] >= 0).all()


def test_shape_and_type() -> None:
    rows = empty_rows(3, 5, torch.bool)
    assert rows.shape == (3, 5)
    assert rows.dtype == torch.bool
    assert rows.is_contiguous()
