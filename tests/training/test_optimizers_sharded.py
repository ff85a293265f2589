"""Every optimizer on shards (FSDP2): the weights are those of one process, an empty shard does no harm."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.optimizers import build_optimizer

KINDS = {
    "adamw": {},
    "selective": {"selective_updates": True},
    "recorded": {"record_update_metrics": True},
    "lion": {"optimizer": "lion", "learning_rate": 1e-3},
    "muon": {"optimizer": "muon"},
}


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def train(model, kind, *, rank, world_size):
    """Four steps on a fixed batch split over ranks; two rows of the embedding are never looked up."""
    tokens = torch.tensor([0, 1, 2, 3, 0, 2, 1, 3])
    share = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    optimizer = build_optimizer(model, TrainingArgs(**{"learning_rate": 0.01, **KINDS[kind]}))
    metrics = {}
    for _ in range(4):
        optimizer.zero_grad()
        (model(tokens[share]).square().sum() / 8 * world_size).backward()
        if kind in ("recorded", "lion"):
            optimizer.record_next = True
        optimizer.step()
        if kind in ("recorded", "lion"):
            metrics = {name: value.double() for name, value in optimizer.pop_update_metrics().items()}
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return {"weights": torch.cat([tensor.detach().flatten() for tensor in whole]), "metrics": metrics}


def sharded_run(rank, kind):
    model = build_model()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    assert model[3].weight.to_local().numel() == (7 if rank == 0 else 0)
    return train(model, kind, rank=rank, world_size=2)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_learn_what_one_process_learns(two_ranks, kind):
    expected = train(build_model(), kind, rank=0, world_size=1)
    # Muon orthogonalises in bfloat16 (8 bits): a gradient that differs in the last bit may round to its neighbour.
    tolerance = 0.01 * 2**-6 if kind == "muon" else 1e-6
    for found in two_ranks(sharded_run, kind):
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0.0, atol=tolerance)
        assert set(found["metrics"]) == set(expected["metrics"])
        for name, value in expected["metrics"].items():
            torch.testing.assert_close(found["metrics"][name], value, rtol=1e-5, atol=1e-9, msg=name)


def test_rows_that_are_never_looked_up_stay_with_selective_updates_only():
    start = build_model()[0].weight.detach()[4:]
    for kind, stays in (("selective", True), ("adamw", False)):
        model = build_model()
        settings = TrainingArgs(learning_rate=0.01, decay_embeddings=True, **KINDS[kind])
        optimizer = build_optimizer(model, settings)
        model(torch.tensor([0, 1])).sum().backward()
        optimizer.step()
        assert torch.equal(model[0].weight.detach()[4:], start) is stays
