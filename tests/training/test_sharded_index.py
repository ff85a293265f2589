"""The index of a sharded checkpoint is a pickle; one that names anything foreign is refused before torch reads it."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from olmo_hf.errors import CheckpointError
from olmo_hf.training.readers import ShardedReader


class Poison:
    """Unpickling this would write a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_an_honest_index_is_read(tmp_path):
    dcp.save({"model.weight": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    assert ShardedReader(tmp_path).names() == ["model.weight"]


def test_a_poisoned_index_is_refused_and_runs_nothing(tmp_path):
    dcp.save({"model.weight": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Poison(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="unreadable"):
        ShardedReader(tmp_path)
    assert not (tmp_path / "ran").exists()
