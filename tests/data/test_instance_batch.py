"""Batches travel small between processes, and are whole where they arrive."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from olmo_hf.data.args import InstanceFilterArgs
from olmo_hf.data.collator import DataCollator
from olmo_hf.data.instance_batch import PackedBatch
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.order import DataPosition, OrderedDataset


class Watching:
    """A collator that also tells what it sends from a worker: type of the tokens, and all bytes."""

    def __init__(self) -> None:
        self.collator = DataCollator(0)

    def __call__(self, items: list) -> Any:
        batch = self.collator(items)
        if isinstance(batch, PackedBatch):
            batch.columns["sent"] = [str(batch.tokens.dtype), len(pickle.dumps(batch))]
        return batch


S = 512


@pytest.fixture
def path(tmp_path: Path) -> str:
    np.arange(10 * S, dtype=np.uint16).tofile(tmp_path / "a.npy")
    (np.arange(10 * S) % 3 > 0).tofile(tmp_path / "mask.bool")
    return str(tmp_path / "a.npy")


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_sends_tokens_and_the_batch_is_made_where_it_arrives(path: str, workers: int, masks: bool) -> None:
    mask_paths = [str(Path(path).with_name("mask.bool"))] if masks else None
    dataset = MemMapDataset([path], sequence_length=S, token_dtype="uint16", label_mask_paths=mask_paths)
    batches = list(DataLoader(dataset, batch_size=5, num_workers=workers, collate_fn=Watching()))
    assert torch.cat([batch["input_ids"] for batch in batches]).flatten().tolist() == list(range(10 * S))
    labels = torch.cat([batch["labels"] for batch in batches]).flatten().tolist()
    assert labels == [-100 if masks and token % 3 == 0 else token for token in range(10 * S)]
    for batch in batches:
        assert type(batch) is dict
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        if workers:
            # Input ids and labels of int64 would be 16 bytes a token, a tensor in shared memory a handle without any.
            dtype, size_bytes = batch["sent"]
            assert dtype == "torch.uint16"
            assert S * 5 * (3 if masks else 2) < size_bytes < S * 5 * (3 if masks else 2) + 700
        batch["labels"].fill_(-100)
        assert (batch["input_ids"] >= 0).all()


class Wrapping:
    """What looks into a batch inside the worker, as the collators of other libraries do."""

    def __call__(self, items: list) -> dict:
        return {key: value for key, value in DataCollator(0)(items).items() if key != "index"}


def test_a_batch_looked_at_in_the_worker_is_the_same(path: str) -> None:
    dataset = MemMapDataset([path], sequence_length=S, token_dtype="uint16")
    (batch,) = DataLoader(dataset, batch_size=10, num_workers=1, collate_fn=Wrapping())
    assert batch["input_ids"].flatten().tolist() == batch["labels"].flatten().tolist() == list(range(10 * S))


def test_a_worker_needs_no_shared_memory(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's `/dev/shm` is often 64 MB; every kind of column gets through without it."""

    def refuse(*args: object) -> None:
        raise RuntimeError("no room in /dev/shm")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
    monkeypatch.setattr(torch.UntypedStorage, "_share_filename_cpu_", refuse)
    dataset = MemMapDataset(
        [path],
        sequence_length=S,
        token_dtype="uint16",
        label_mask_paths=[str(Path(path).with_name("mask.bool"))],
        eos_token_id=7,
        pad_token_id=0,
        instance_filter=InstanceFilterArgs(),
        generate_doc_lens=True,
        generate_attention_mask=True,
        metadata={"path": path},
    )
    order = OrderedDataset(dataset, seed=0, shuffle=False, global_batch_size=5, start=DataPosition())
    sampler = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    here, there = (
        list(DataLoader(order, batch_sampler=sampler, collate_fn=DataCollator(0), num_workers=workers))
        for workers in (0, 1)
    )
    for expected, found in zip(here, there, strict=True):
        assert list(expected) == list(found)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert found[key].dtype == value.dtype
                assert torch.equal(found[key], value)
            else:
                assert found[key] == value
