"""The dataset against the original's items, and what it promises to loaders."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from olmo_hf.data.args import InstanceFilterArgs
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.errors import DataError

FOLDER = Path(__file__).parents[1] / "golden" / "04_memmap"
CASES = json.loads((FOLDER / "memmap.json").read_text())
READABLE = [case for case in CASES if "raises" not in case]


def dataset_of(case: dict) -> MemMapDataset:
    options = case["options"] if isinstance(case["options"], dict) else {}
    metadata: dict | list = {}
    if options.get("metadata") == "list":
        metadata = [{"label": f"L{i}"} for i in range(len(case["files"]))]
    elif options.get("metadata") == "dict":
        metadata = {"label": "same"}
    return MemMapDataset(
        [str(FOLDER / "data" / name) for name in case["files"]],
        sequence_length=case["chunk_size"],
        token_dtype=case["memmap_dtype"],
        label_mask_paths=[str(FOLDER / "data" / name) for name in case["mask_files"]] if case["mask_files"] else None,
        eos_token_id=case.get("eos_token_id"),
        pad_token_id=case.get("pad_token_id"),
        instance_filter=InstanceFilterArgs() if options.get("filt") else None,
        generate_doc_lens=bool(options.get("doc")),
        generate_attention_mask=bool(options.get("attn")),
        metadata=None if options.get("include_md") is False else metadata,
    )


def plain(item: dict) -> dict:
    """An item in the form it was recorded in."""
    out = {}
    for key, value in item.items():
        if isinstance(value, torch.Tensor):
            out[key] = value.int().tolist() if value.dtype == torch.bool else value.tolist()
            out[f"{key}.dtype"] = str(value.dtype)
        else:
            out[key] = value
    return out


@pytest.mark.parametrize("case", READABLE, ids=lambda c: f"{c['memmap_dtype']}-{sorted(c['options'])}")
def test_items_equal_the_originals(case: dict) -> None:
    dataset = dataset_of(case)
    assert len(dataset) == case["len"]
    assert [list(o) for o in dataset.file_offsets] == case["offsets"]
    for index, expected in case["items"].items():
        assert plain(dataset[int(index)]) == expected
    assert plain(dataset[-1]) == case["item_minus_1"]
    assert sorted(dataset[0]) == case["keys"]
    for outside in (9, -10):
        with pytest.raises(IndexError):
            dataset[outside]


@pytest.mark.parametrize("case", [c for c in CASES if "raises" in c], ids=lambda c: c["memmap_dtype"])
def test_mask_of_another_size_is_refused(case: dict) -> None:
    with pytest.raises(DataError, match=r"label flags for the .* tokens"):
        dataset_of(case)


def write(path: Path, values: list[int] | np.ndarray, dtype: str = "uint16") -> str:
    np.asarray(values, dtype=dtype).tofile(path)
    return str(path)


def test_repeated_paths_count_again_and_tails_are_dropped(tmp_path: Path) -> None:
    first = write(tmp_path / "a.npy", np.arange(11))
    second = write(tmp_path / "b.bin", np.arange(100, 103))
    dataset = MemMapDataset([first, second, first], sequence_length=4, token_dtype="uint16")
    assert len(dataset) == 4
    assert [dataset[i]["input_ids"].tolist()[0] for i in range(4)] == [0, 4, 0, 4]
    assert dataset.locate(2) == (first, 2, 0)
    assert dataset.locate(-1) == (first, 2, 4)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_every_token_type_and_numpy_headers(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(40).astype(dtype)
    tokens[-1] = np.iinfo(dtype).max if dtype != "uint64" else 2**40
    raw = write(tmp_path / "raw.npy", tokens, dtype)
    np.save(tmp_path / "with_header.npy", tokens)
    dataset = MemMapDataset([raw, str(tmp_path / "with_header.npy")], sequence_length=8, token_dtype=dtype)
    assert len(dataset) == 10
    for i in range(5):
        assert dataset[i]["input_ids"].tolist() == tokens[8 * i : 8 * i + 8].tolist()
        assert torch.equal(dataset[i]["input_ids"], dataset[i + 5]["input_ids"])


def test_numpy_header_of_another_type_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.uint32))
    with pytest.raises(DataError, match=r"x\.npy: its NumPy header says uint32, expected uint16"):
        MemMapDataset([str(tmp_path / "x.npy")], sequence_length=8, token_dtype="uint16")
    np.save(tmp_path / "f.npy", np.arange(40, dtype=np.float32))
    with pytest.raises(DataError, match="expected one dimension of unsigned integers"):
        MemMapDataset([str(tmp_path / "f.npy")], sequence_length=8, token_dtype="uint32")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_numpy_header(tmp_path: Path, version: tuple[int, int]) -> None:
    with open(tmp_path / "v.npy", "wb") as stream:
        np.lib.format.write_array(stream, np.arange(16, dtype=np.uint16), version=version)
    dataset = MemMapDataset([str(tmp_path / "v.npy")], sequence_length=8, token_dtype="uint16")
    assert [dataset[i]["input_ids"].tolist() for i in range(2)] == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("added_bytes", [-20, 64])
def test_a_numpy_file_cut_off_or_added_to_is_refused(tmp_path: Path, added_bytes: int) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(40, dtype=np.uint16))
    content = path.read_bytes()
    path.write_bytes(content[:added_bytes] if added_bytes < 0 else content + bytes(added_bytes))
    said = rf"says 40 tokens, but {80 + added_bytes} bytes follow, expected 80; the file is cut off or was added to"
    with pytest.raises(DataError, match=said):
        MemMapDataset([str(path)], sequence_length=8, token_dtype="uint16")


def test_bytes_of_another_machine_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40, dtype=">u2"))
    with pytest.raises(DataError, match=r"in the order of another kind of machine \(>u2\); save it again as uint16"):
        MemMapDataset([str(tmp_path / "x.npy")], sequence_length=8, token_dtype="uint16")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(DataError, match="is no regular file"):
            MemMapDataset([path], sequence_length=8, token_dtype="uint16")
    with pytest.raises(DataError, match="embedded null byte"):
        MemMapDataset(["a\0b"], sequence_length=8, token_dtype="uint16")


def test_all_unusable_files_are_named_at_once(tmp_path: Path) -> None:
    odd = tmp_path / "odd.npy"
    odd.write_bytes(b"123")
    with pytest.raises(DataError) as caught:
        MemMapDataset([str(odd), str(tmp_path / "gone.npy")], sequence_length=8, token_dtype="uint16")
    assert "3 bytes are no whole number of uint16 tokens" in str(caught.value)
    assert "gone.npy: cannot be read (No such file or directory)" in str(caught.value)


def test_unknown_token_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sequence_length: found 0, expected 1 or more"):
        MemMapDataset([write(tmp_path / "a.npy", [1])], sequence_length=0, token_dtype="uint16")
    with pytest.raises(DataError, match=r"data\.token_dtype: found 'uint61', expected one of uint8"):
        MemMapDataset([write(tmp_path / "a.npy", [1])], sequence_length=1, token_dtype="uint61")


def test_pickles_by_path_and_small(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", np.arange(60_000))
    dataset = MemMapDataset([path], sequence_length=64, token_dtype="uint16")
    assert dataset[3]["input_ids"][0] == 192
    content = pickle.dumps(dataset)
    assert len(content) < 2_000
    assert torch.equal(pickle.loads(content)[5]["input_ids"], dataset[5]["input_ids"])


def test_metadata_is_a_copy(tmp_path: Path) -> None:
    dataset = MemMapDataset(
        [write(tmp_path / "a.npy", [1, 2])], sequence_length=1, token_dtype="uint16", metadata={"tags": ["x"]}
    )
    dataset[0]["metadata"]["tags"].append("y")
    assert dataset[1]["metadata"] == {"tags": ["x"]}


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_the_same(tmp_path: Path, context: str) -> None:
    path = write(tmp_path / "a.npy", np.arange(1_000))
    dataset = MemMapDataset([path], sequence_length=10, token_dtype="uint16")
    dataset[0]  # the parent has the file open before workers exist
    loader = DataLoader(dataset, batch_size=7, num_workers=2, multiprocessing_context=context)
    seen = torch.cat([batch["input_ids"] for batch in loader])
    assert torch.equal(seen, torch.arange(1_000).reshape(100, 10))


def test_a_file_that_shrinks_is_named_also_in_a_worker(tmp_path: Path) -> None:
    path = write(tmp_path / "shrinks.npy", np.arange(1_000))
    dataset = MemMapDataset([path], sequence_length=10, token_dtype="uint16")
    dataset[0]
    with open(path, "r+b") as stream:
        stream.truncate(1_000)
    with pytest.raises(DataError, match=r"shrinks\.npy: ends 20 bytes short of token 1,000"):
        dataset[99]
    with pytest.raises(DataError, match=r"shrinks\.npy"):
        list(DataLoader(dataset, batch_size=10, num_workers=1))


def test_more_files_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("olmo_hf.data.token_files.MAX_OPEN_FILES", 3)
    paths = [write(tmp_path / f"{i}.npy", [i, i]) for i in range(10)]
    dataset = MemMapDataset(paths, sequence_length=2, token_dtype="uint16")
    for _ in range(2):
        assert [dataset[i]["input_ids"].tolist() for i in range(10)] == [[i, i] for i in range(10)]
    assert len(dataset._reader._descriptors) == 3
