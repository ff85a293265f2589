"""The order of a run: against the original's batches, and its own promises."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from olmo_hf.data.collator import DataCollator
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.order import DataPosition, OrderedDataset, advance
from olmo_hf.data.sampler import GlobalBatchSampler
from olmo_hf.errors import DataError

GOLDEN = Path(__file__).parents[1] / "golden/03_data_order"
SMALL = json.loads((GOLDEN / "small.json").read_text())


def numbered(folder: Path, num_instances: int) -> MemMapDataset:
    """A data set whose instance i is the two tokens (i, i)."""
    path = folder / "numbered.npy"
    np.repeat(np.arange(num_instances, dtype=np.uint16), 2).tofile(path)
    return MemMapDataset([str(path)], sequence_length=2, token_dtype="uint16")


def ordered(dataset: MemMapDataset, start: DataPosition, batch: int, seed: int = 7) -> OrderedDataset:
    return OrderedDataset(dataset, seed=seed, shuffle=True, global_batch_size=batch, start=start)


WHOLE = [
    c for c in SMALL if c["drop_last"] and c["max_examples"] is None and c["total_size"] >= c["global_batch_size"]
]


@pytest.mark.parametrize("case", WHOLE, ids=lambda c: f"n{c['dataset_size']}-w{c['world_size']}-s{c['start_index']}")
def test_batches_of_a_rank_equal_the_originals(case: dict, tmp_path: Path) -> None:
    dataset = OrderedDataset(
        numbered(tmp_path, case["dataset_size"]),
        seed=case["seed"],
        shuffle=case["shuffle"],
        global_batch_size=case["global_batch_size"],
        start=DataPosition(case["epoch"], case["start_index"]),
    )
    steps = len(dataset) // case["global_batch_size"]
    whole = []
    for rank, expected in case["dataloader_batches_workers0"].items():
        sampler = GlobalBatchSampler(
            steps=steps,
            global_batch_size=case["global_batch_size"],
            per_device_batch_size=case["device_batch_size"],
            rank=int(rank),
            world_size=case["world_size"],
        )
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollator(0))
        got = [batch["index"].tolist() for batch in loader]
        assert got == expected[:steps]
        whole.append(sum(len(b) == case["device_batch_size"] for b in expected))
    # What the original has beyond that, it does not have on every rank.
    assert min(whole) == steps


def test_a_batch_that_cannot_be_dealt_is_refused_as_by_the_original() -> None:
    (case,) = [c for c in json.loads((GOLDEN / "errors.json").read_text()) if "max_examples" not in c]
    with pytest.raises(ValueError, match="a global batch of 6 cannot be dealt to 4 ranks"):
        GlobalBatchSampler(
            steps=1, global_batch_size=case["gbs"], per_device_batch_size=1, rank=0, world_size=case["world_size"]
        )


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 50),
    batch=st.integers(1, 12),
    begin=st.integers(0, 50),
    a=st.integers(0, 40),
    b=st.integers(0, 40),
)
def test_advancing_in_pieces_is_advancing_at_once(n: int, batch: int, begin: int, a: int, b: int) -> None:
    start = DataPosition(3, min(begin, n))
    if n < batch:
        with pytest.raises(DataError, match="fewer than one global batch"):
            advance(start, a, global_batch_size=batch, num_instances=n)
        return
    there = advance(start, a, global_batch_size=batch, num_instances=n)
    assert advance(there, b, global_batch_size=batch, num_instances=n) == advance(
        start, a + b, global_batch_size=batch, num_instances=n
    )
    assert 0 <= there.instances <= n


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 40), batch=st.integers(1, 9), begin=st.integers(0, 40), cut=st.integers(0, 12))
def test_a_restart_continues_exactly(tmp_path_factory, n: int, batch: int, begin: int, cut: int) -> None:
    if n < batch:
        return
    dataset = numbered(tmp_path_factory.mktemp("data"), n)
    start = DataPosition(2, min(begin, n))
    whole = ordered(dataset, start, batch)
    again = ordered(dataset, advance(start, cut, global_batch_size=batch, num_instances=n), batch)
    steps = 3 * (n // batch) + 2
    expected = whole.instance_ids(cut * batch, (cut + steps) * batch)
    assert again.instance_ids(0, steps * batch).tolist() == expected.tolist()
    assert [whole[k]["index"] for k in range(cut * batch, (cut + 2) * batch)] == expected[: 2 * batch].tolist()


def test_epochs_hold_every_instance_once_but_the_remainder(tmp_path: Path) -> None:
    # 41 instances in batches of 8: 40 are read, one is dropped, another one each epoch.
    data = ordered(numbered(tmp_path, 41), DataPosition(), 8)
    assert (len(data), data.steps_per_epoch, data.num_instances) == (40, 5, 41)
    epochs = [data.instance_ids(40 * e, 40 * e + 40) for e in range(3)]
    for ids in epochs:
        assert np.unique(ids).size == 40
    assert not np.array_equal(epochs[0], epochs[1])
    assert data.instance_ids(0, 120).tolist() == np.concatenate(epochs).tolist()


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_and_epochs_change_nothing(tmp_path: Path, workers: int) -> None:
    # Resumed in the middle of an epoch and run far into the third with persistent workers.
    start = DataPosition(0, 24)
    data = ordered(numbered(tmp_path, 41), start, 8)
    expected = data.instance_ids(0, 14 * 8)
    per_rank = []
    for rank in range(2):
        sampler = GlobalBatchSampler(steps=14, global_batch_size=8, per_device_batch_size=2, rank=rank, world_size=2)
        assert len(sampler) == 28
        loader = DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=DataCollator(0),
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        batches = list(loader)
        assert all(torch.equal(b["input_ids"][:, 0], b["index"]) for b in batches)
        per_rank.append(torch.cat([b["index"] for b in batches]).reshape(14, 4))
    assert torch.stack(per_rank, dim=-1).reshape(14, 8).tolist() == expected.reshape(14, 8).tolist()


def test_ranks_share_an_epoch_without_overlap(tmp_path: Path) -> None:
    """41 instances, 2 ranks, micro-batches of 2, 2 of them a step: 5 steps of 8, one instance left over."""
    data = ordered(numbered(tmp_path, 41), DataPosition(), 8)
    seen = []
    for rank in range(2):
        sampler = GlobalBatchSampler(
            steps=data.steps_per_epoch, global_batch_size=8, per_device_batch_size=2, rank=rank, world_size=2
        )
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=DataCollator(0))
        seen.append(torch.cat([batch["index"] for batch in loader]).tolist())
    assert [len(ids) for ids in seen] == [41 // 8 * 4] * 2
    assert not set(seen[0]) & set(seen[1])
    assert len(set(seen[0]) | set(seen[1])) == 40


def test_micro_batches_cut_a_step_and_never_cross_it() -> None:
    sampler = GlobalBatchSampler(steps=2, global_batch_size=10, per_device_batch_size=3, rank=1, world_size=2)
    assert list(sampler) == [[1, 3, 5], [7, 9], [11, 13, 15], [17, 19]]
    assert len(sampler) == 4
    with pytest.raises(ValueError, match="cannot be dealt"):
        GlobalBatchSampler(steps=1, global_batch_size=6, per_device_batch_size=3, rank=1, world_size=4)


def test_a_start_behind_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"50 instances into its epoch, but the data hold 41"):
        ordered(numbered(tmp_path, 41), DataPosition(0, 50), 8)


def test_file_order_without_shuffling(tmp_path: Path) -> None:
    data = OrderedDataset(numbered(tmp_path, 10), seed=1, shuffle=False, global_batch_size=4, start=DataPosition(0, 4))
    assert data.instance_ids(0, 12).tolist() == [4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(IndexError, match="no end"):
        data[-1]


def test_pickle_leaves_the_orders_behind(tmp_path: Path) -> None:
    data = ordered(numbered(tmp_path, 20_000), DataPosition(), 8)
    first = data[0]["index"]
    content = pickle.dumps(data)
    assert len(content) < 3_000
    assert pickle.loads(content)[0]["index"] == first


def test_an_order_on_disk_is_the_order_in_memory(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 41)
    kept = OrderedDataset(
        dataset,
        seed=7,
        shuffle=True,
        global_batch_size=8,
        start=DataPosition(0, 8),
        index_dir=str(tmp_path / "index"),
    )
    assert kept.instance_ids(0, 100).tolist() == ordered(dataset, DataPosition(0, 8), 8).instance_ids(0, 100).tolist()
    assert len(list((tmp_path / "index").glob("*.u32"))) == 3


def test_permutation_restarts_and_covers_like_the_shuffle(tmp_path: Path) -> None:
    dataset = numbered(tmp_path, 41)

    def permutation(start: DataPosition) -> OrderedDataset:
        return OrderedDataset(dataset, seed=7, shuffle=True, global_batch_size=8, start=start, order="permutation")

    whole = permutation(DataPosition())
    assert whole.steps_per_epoch == 5
    for epoch in range(2):
        assert np.unique(whole.instance_ids(40 * epoch, 40 * epoch + 40)).size == 40
    again = permutation(advance(DataPosition(), 7, global_batch_size=8, num_instances=41))
    assert again.instance_ids(0, 80).tolist() == whole.instance_ids(56, 136).tolist()
    assert [item["index"] for item in whole.__getitems__([39, 40, 3])] == [
        int(whole.instance_ids(k, k + 1)[0]) for k in (39, 40, 3)
    ]


def test_random_offsets_have_no_epochs_and_restart(tmp_path: Path) -> None:
    tokens = np.arange(1_000, dtype=np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    dataset = MemMapDataset(
        [str(tmp_path / "train.bin")], sequence_length=16, token_dtype="uint16", instance_stride_tokens=1
    )
    assert len(dataset) == 1_000 - 16 + 1
    assert dataset[984]["input_ids"].tolist() == list(range(984, 1_000))

    def offsets(start: DataPosition) -> OrderedDataset:
        return OrderedDataset(
            dataset, seed=7, shuffle=True, global_batch_size=2_000, start=start, order="random_offsets"
        )

    whole = offsets(DataPosition())
    ids = whole.instance_ids(0, 6_000)
    assert all(whole[k]["input_ids"][0] == ids[k] for k in (0, 1, 5_999))
    assert ids.min() < 10
    assert ids.max() > 974
    start = advance(DataPosition(), 2, global_batch_size=2_000, num_instances=whole.num_instances)
    assert start == DataPosition(0, 4_000)
    assert offsets(start).instance_ids(0, 2_000).tolist() == ids[4_000:].tolist()
