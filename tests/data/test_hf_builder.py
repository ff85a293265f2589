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


@pytest.mark.parametrize("streaming", [False, True])
def test_what_gives_no_instance_is_named(files: list[str], tmp_path: Path, streaming: bool) -> None:
    np.arange(S - 1, dtype=np.uint16).tofile(tmp_path / "short.npy")
    # One short or empty file among others is left out, as by the torch data set.
    assert len(list(load([*files, str(tmp_path / "short.npy")], streaming=streaming))) == 61
    with pytest.raises(DataError, match=r"the files of 'train' hold no instance of 8 tokens"):
        load([str(tmp_path / "short.npy")], streaming=streaming)
    for options in ({"sequence_length": 0}, {"sequence_length": -1}, {"instances_per_shard": 0}):
        with pytest.raises(DataError, match=rf"{next(iter(options))}: found .*, expected 1 or more"):
            load(files, streaming=streaming, **options)


def test_a_change_that_keeps_size_and_time_is_noticed(files: list[str]) -> None:
    before = os.stat(files[1])
    assert load(files)["input_ids"][30] != [9] * S
    np.full(20 * S + 3, 9, np.uint16).tofile(files[1])
    os.utime(files[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load(files)["input_ids"][30] == [9] * S


@pytest.fixture
def masks(files: list[str]) -> list[str]:
    paths = []
    for number, path in enumerate(files):
        mask = Path(path).with_suffix(".bool")
        (np.random.default_rng(number).random(os.path.getsize(path) // 2) < 0.5).tofile(mask)
        paths.append(str(mask))
    return paths


def expected_masks(files: list[str], masks: list[str]) -> list[list[bool]]:
    dataset = MemMapDataset(files, sequence_length=S, token_dtype="uint16", label_mask_paths=masks)
    return [dataset[i]["label_mask"].tolist() for i in range(len(dataset))]


def test_label_masks(files: list[str], masks: list[str]) -> None:
    with_masks = {"label_mask_files": {"train": masks}}
    data = load(files, **with_masks)
    assert data.features["label_mask"] == datasets.List(datasets.Value("bool"), length=S)
    assert data["input_ids"][:] == expected(files)
    assert data["label_mask"][:] == expected_masks(files, masks)
    assert load(files, num_proc=2, **with_masks)["label_mask"][:] == expected_masks(files, masks)
    stream = load(files, streaming=True, instances_per_shard=7, **with_masks)
    rows = []
    for row in stream:
        rows.append(row)
        if len(rows) == 37:
            state = stream.state_dict()
    assert [row["label_mask"] for row in rows] == expected_masks(files, masks)
    again = load(files, streaming=True, instances_per_shard=7, **with_masks)
    again.load_state_dict(state)
    assert list(again) == rows[37:]
    # Another mask for the same tokens is another data set.
    np.zeros(os.path.getsize(masks[0]), np.bool_).tofile(masks[0])
    assert load(files, **with_masks)["label_mask"][0] == [False] * S


def test_label_masks_that_do_not_fit(files: list[str], masks: list[str]) -> None:
    with pytest.raises(DataError, match=r"2 files for the 3 token files of 'train'"):
        load(files, label_mask_files={"train": masks[:2]}, streaming=True)
    with pytest.raises(DataError, match=r"has 'validation', which is no split"):
        load(files, label_mask_files={"train": masks, "validation": masks}, streaming=True)
    with pytest.raises(DataError, match=r"163 label flags for the 243 tokens"):
        load(files, label_mask_files={"train": [masks[1], *masks[1:]]}, streaming=True)


def test_workers_share_a_stream(files: list[str]) -> None:
    """A loader's workers each take some shards; every row comes once, in the next epoch too."""
    stream = load(files, streaming=True, instances_per_shard=7)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    for _ in range(2):
        assert sorted(row["input_ids"] for row in loader) == sorted(expected(files))
