"""From the section to the data."""

from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from olmo_hf.data.args import DataArgs, InstanceFilterArgs
from olmo_hf.data.build import build_eval_data, build_train_data, describe_problems
from olmo_hf.data.order import DataPosition
from olmo_hf.data.sampler import GlobalBatchSampler
from olmo_hf.errors import DataError


def write(path: Path, tokens: np.ndarray, dtype: str = "uint16") -> str:
    tokens.astype(dtype).tofile(path)
    return str(path)


def train(args: DataArgs, **changes):
    settings = dict(
        seed=1,
        eos_token_id=0,
        pad_token_id=1,
        vocab_size=500,
        global_train_batch_size=4,
        start=DataPosition(),
    )
    return build_train_data(args, **{**settings, **changes})


def test_a_section_becomes_batches(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("b", "a"):
        write(tmp_path / f"{name}.npy", rng.integers(0, 500, 64))
    write(tmp_path / "mask.bool", rng.integers(0, 2, 64), "bool")
    args = DataArgs(
        paths=(str(tmp_path / "*.npy"),),
        label_mask_paths=(str(tmp_path / "mask.bool"),) * 2,
        token_dtype="uint16",
        sequence_length=8,
        instance_filter=InstanceFilterArgs(),
        document_masking=True,
    )
    data, collator = train(args)
    assert [Path(p).name for p in data.dataset.paths] == ["a.npy", "b.npy"]
    sampler = GlobalBatchSampler(steps=4, global_batch_size=4, per_device_batch_size=4, rank=0, world_size=1)
    batches = list(DataLoader(data, batch_sampler=sampler, collate_fn=collator))
    assert sorted(np.concatenate([b["index"] for b in batches]).tolist()) == list(range(16))
    assert sorted(batches[0]) == sorted(
        ["input_ids", "label_mask", "instance_mask", "doc_lens", "max_doc_lens", "index", "labels"]
    )
    assert all((b["doc_lens"].sum(dim=1) == 8).all() for b in batches)


def test_the_sections_seed_goes_before_the_runs(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", np.arange(400))
    orders = [
        train(DataArgs(paths=(path,), token_dtype="uint16", sequence_length=4, seed=own), seed=of_run)[0]
        .instance_ids(0, 100)
        .tolist()
        for own, of_run in ((None, 0), (0, 5), (None, 5))
    ]
    assert orders[0] == orders[1] != orders[2]


def test_all_problems_in_one_message(tmp_path: Path) -> None:
    args = DataArgs(
        paths=(str(tmp_path / "x.npy"), str(tmp_path / "y.npy")), token_dtype="uint16", document_masking=True
    )
    with pytest.raises(DataError) as caught:
        train(args, eos_token_id=None)
    assert str(caught.value).startswith("3 problems with the data:")
    for part in ("x.npy", "y.npy", "data.document_masking"):
        assert str(caught.value).count(part) == 1


def test_many_problems_are_cut() -> None:
    text = describe_problems([f"p{i}" for i in range(30)])
    assert text.startswith("30 problems")
    assert "p19" in text
    assert "p20" not in text
    assert text.endswith("... and 10 more")


def test_evaluation_reads_in_file_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", np.arange(40))
    data, collator = build_eval_data(
        DataArgs(paths=(path,), token_dtype="uint16", sequence_length=4),
        eos_token_id=None,
        pad_token_id=None,
        vocab_size=None,
    )
    assert len(data) == 10
    batch = collator(data.__getitems__([0, 1]))
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch["labels"].tolist() == batch["input_ids"].tolist()


def test_orders_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", np.arange(400))

    def ids(**more):
        args = DataArgs(paths=(path,), token_dtype="uint16", sequence_length=4, **more)
        return train(args)[0].instance_ids(0, 100).tolist()

    assert sorted(ids()) == sorted(ids(order="permutation")) == list(range(100))
    assert ids() != ids(order="permutation")
    assert max(ids(order="random_offsets")) > 100
    assert ids(index_dir=str(tmp_path / "index")) == ids()
    assert list((tmp_path / "index").glob("*.u32"))
    with pytest.raises(DataError, match=r"data\.order: found 'permutation' with `data\.shuffle: false`"):
        ids(order="permutation", shuffle=False)


def test_random_offsets_need_only_one_instance(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", np.arange(5))
    args = DataArgs(paths=(path,), token_dtype="uint16", sequence_length=4, order="random_offsets")
    data, _ = train(args, global_train_batch_size=64)
    assert set(data.instance_ids(0, 64).tolist()) == {0, 1}
