"""Shards put together, or their lack named."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.convert import open_checkpoint
from olmo_hf.model.conversion.sharded import from_distributed_checkpoint, rank_files

CHECKPOINTS = Path(__file__).parents[2] / "golden" / "11_checkpoints"


@pytest.mark.parametrize("kind", ["torch_legacy", "local", "torch_new", "olmo_core"])
def test_a_missing_rank_is_named(tmp_path, kind):
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINTS / f"sharded_{kind}_ws2", source)
    victim = {"torch_legacy": "rank1.pt", "local": "model/rank1.pt", "torch_new": "model_and_optim/__1_0.distcp"}
    (source / victim.get(kind, "__1_0.distcp")).unlink()
    with pytest.raises(ConversionError, match=r"missing|do not add up"):
        open_checkpoint(source)


def test_distributed_checkpoint_of_this_release_of_torch(tmp_path):
    tensors = {
        "a.weight": torch.randn(5, 3),
        "b": torch.arange(4),
        "c": torch.tensor(2.0),
        "d": torch.ones(2).bfloat16(),
    }
    dcp.save({**tensors, "note": "text"}, checkpoint_id=tmp_path, no_dist=True)
    table = from_distributed_checkpoint(tmp_path)
    assert table.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (table[name].shape, table[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(table[name].read(), tensor)


def test_rank_files_in_order_and_without_gaps(tmp_path):
    for rank in (10, 2, 0, 1, *range(3, 10)):
        (tmp_path / f"rank{rank}.pt").touch()
    assert [path.stem for path in rank_files(tmp_path)] == [f"rank{rank}" for rank in range(11)]
    (tmp_path / "rank5.pt").unlink()
    with pytest.raises(ConversionError, match="without gaps"):
        rank_files(tmp_path)
