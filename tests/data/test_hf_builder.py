"""`datasets.load_dataset("olmo_memmap", ...)`, in all the ways it is used."""

import os
from pathlib import Path

import datasets
import numpy as np
import pytest
from torch.utils.data import DataLoader

from olmo_hf.data.hf_builder import register_dataset_builder
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.errors import DataError

S = 8


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_dataset_builder()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """30 + 20 + 11 instances, each with a tail."""
    paths = []
    for number, count in enumerate((30, 20, 11)):
        path = tmp_path / f"{number}.npy"
        (np.arange(count * S + 3) % 60_000 + number).astype(np.uint16).tofile(path)
        paths.append(str(path))
    return paths


def load(files: list[str], **options):
    options = {"sequence_length": S, "token_dtype": "uint16", **options}
    return datasets.load_dataset("olmo_memmap", data_files={"train": files}, **options)["train"]


def expected(files: list[str]) -> list[list[int]]:
    dataset = MemMapDataset(files, sequence_length=S, token_dtype="uint16")
    return [dataset[i]["input_ids"].tolist() for i in range(len(dataset))]


def test_equals_the_torch_dataset(files: list[str]) -> None:
    data = load(files)
    assert data.features == datasets.Features({"input_ids": datasets.List(datasets.Value("uint16"), length=S)})
    assert load(files, streaming=True).features == data.features
    assert data["input_ids"][:] == expected(files)
    torch_item = data.with_format("torch")[0]["input_ids"]
    assert torch_item.tolist() == expected(files)[0]


@pytest.mark.parametrize("instances_per_shard", [None, 7])
def test_streaming_and_its_state(files: list[str], instances_per_shard: int | None) -> None:
    stream = load(files, streaming=True, instances_per_shard=instances_per_shard)
    assert stream.num_shards == (3 if instances_per_shard is None else 5 + 3 + 2)
    rows = []
    for row in stream:
        rows.append(row["input_ids"])
        if len(rows) == 37:
            state = stream.state_dict()
    assert rows == expected(files)
    again = load(files, streaming=True, instances_per_shard=instances_per_shard)
    again.load_state_dict(state)
    assert [row["input_ids"] for row in again] == rows[37:]


def test_several_processes(files: list[str]) -> None:
    assert load(files, num_proc=2)["input_ids"][:] == expected(files)
    loader = DataLoader(load(files, streaming=True), batch_size=None, num_workers=2)
    assert sorted(row["input_ids"] for row in loader) == sorted(expected(files))


def test_a_changed_file_is_never_served_stale(files: list[str]) -> None:
    assert load(files)["input_ids"][:] == expected(files)
    before = os.stat(files[1])
    np.full(20 * S + 3, 9, np.uint16).tofile(files[1])
    os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
    changed = load(files)["input_ids"][:]
    assert changed == expected(files)
    assert changed[30] == [9] * S
    assert len(load(files, sequence_length=2 * S)) == 15 + 10 + 5


def test_numpy_header_and_missing_type(tmp_path: Path) -> None:
    np.save(tmp_path / "h.npy", np.arange(20, dtype=np.uint32))
    data = load([str(tmp_path / "h.npy")], token_dtype="uint32")
    assert data["input_ids"][:] == [list(range(8)), list(range(8, 16))]
    with pytest.raises(DataError, match="token_dtype: is not given"):
        load([str(tmp_path / "h.npy")], token_dtype=None, streaming=True)
