"""The order of an epoch against the original's lists and hashes."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.data.epoch_order import even_out, global_indices, rank_indices

FOLDER = Path(__file__).parents[1] / "golden" / "03_data_order"
SMALL = json.loads((FOLDER / "small.json").read_text())
RESHUFFLE = json.loads((FOLDER / "reshuffle.json").read_text())
LARGE = json.loads((FOLDER / "large.json").read_text())


def order_of(case: dict, epoch: int | None = None) -> np.ndarray:
    order = global_indices(
        case["dataset_size"],
        seed=case["seed"],
        epoch=case["epoch"] if epoch is None else epoch,
        shuffle=case.get("shuffle", True),
    )
    return even_out(order, world_size=case["world_size"], drop_last=case["drop_last"])


@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"n{c['dataset_size']}-w{c['world_size']}-e{c['epoch']}")
def test_small_orders(case: dict) -> None:
    order = order_of(case)
    assert order.size == case["total_size"]
    assert order.tolist() == case["global_indices"]
    for rank, expected in case["per_rank"].items():
        mine = rank_indices(
            order,
            rank=int(rank),
            world_size=case["world_size"],
            start_index=case["start_index"],
            max_examples=case["max_examples"],
        )
        assert mine.tolist() == expected


@pytest.mark.parametrize("case", RESHUFFLE, ids=lambda c: f"n{c['dataset_size']}-file{c['with_work_dir']}")
def test_every_epoch_is_shuffled_anew(case: dict) -> None:
    assert order_of(case, 0).tolist() == case["epoch0"]
    assert order_of(case, 1).tolist() == case["after_reshuffle_1"]
    assert order_of(case, 2).tolist() == case["after_reshuffle_2"]
    batch = case["global_batch_size"]
    started = rank_indices(order_of(case, 0), rank=0, world_size=1, start_index=batch)
    assert started.tolist() == case["epoch0_start_index_is_one_batch"]
    if case["with_work_dir"]:
        # The original's file holds the epoch that was shuffled last.
        written = order_of(case, 2).astype("<u4").tobytes()
        assert hashlib.sha256(written).hexdigest() == case["global_indices_file_bytes_sha256"]


@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"n{c['dataset_size']}-w{c['world_size']}-{c['drop_last']}")
def test_large_orders_by_hash(case: dict) -> None:
    order = order_of(case)
    assert order.size == case["total_size"]
    assert order[:100].tolist() == case["first100"]
    assert order[-100:].tolist() == case["last100"]
    assert hashlib.sha256(order.astype("<u4").tobytes()).hexdigest() == case["sha256_of_uint32_le_bytes"]


def test_the_originals_refusals() -> None:
    for case in json.loads((FOLDER / "errors.json").read_text()):
        if "max_examples" in case:
            with pytest.raises(ValueError, match="no multiple of the 4 ranks"):
                rank_indices(np.arange(case["n"]), rank=0, world_size=4, max_examples=case["max_examples"])
