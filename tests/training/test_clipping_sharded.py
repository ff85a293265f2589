"""Clipping on one process, copies (DDP), shards (FSDP2) and copies of shards (HSDP): same norms, rates and weights.

Measured against the true norm, torch's own function applied to local shards gives another number on every rank.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from olmo_hf.training.clipping import AdaptiveClipper, clip_by_global_norm, gradient_norms

STEPS = 6


def build_model():
    """Seven-element and one-row tensors: two ranks cannot share them evenly, one of them gets nothing of the head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))


def train(model, *, rank, world_size, adaptive):
    """Six SGD steps on a fixed batch split over ranks; the gradient of step 5 is ten times larger."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 5), torch.randn(8, 1)
    share = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    names, parameters = zip(*model.named_parameters(), strict=True)
    clipper = AdaptiveClipper(names, clip_groups="parameter", beta=0.95)
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    totals, rates = [], []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        factor = 10.0 if step == 5 else 1.0
        (factor * (model(inputs[share]) - targets[share]).square().sum() / 8 * world_size).backward()
        norms = gradient_norms(parameters)
        if adaptive:
            rate = clipper.clip(parameters, norms, ratio=1.0, step=step)
        else:
            rate = clip_by_global_norm(parameters, norms, max_norm=0.01)
        optimizer.step()
        totals.append(norms.total.item())
        rates.append(rate.item())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    return {
        "totals": torch.tensor(totals, dtype=torch.float64),
        "rates": torch.tensor(rates),
        "memory": clipper.state_dict()["running_norms"],
        "weights": torch.cat([tensor.detach().flatten() for tensor in whole]),
    }


def spread_run(rank, kind, adaptive):
    """`hsdp`: four ranks, two copies of two shards; the others: two ranks."""
    world_size = dist.get_world_size()
    if kind == "ddp":
        return train(DistributedDataParallel(build_model()), rank=rank, world_size=world_size, adaptive=adaptive)
    if kind == "hsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = build_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert model[4].weight.to_local().numel() == (3 if rank % 2 == 0 else 0)
    assert any(placement.is_replicate() for placement in model[4].weight.placements) is (kind == "hsdp")
    return train(model, rank=rank, world_size=world_size, adaptive=adaptive)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_clipping_does_not_depend_on_how_the_model_is_spread(request, kind, adaptive):
    expected = train(build_model(), rank=0, world_size=1, adaptive=adaptive)
    assert expected["rates"].max() > 0
    ranks = request.getfixturevalue("four_ranks" if kind == "hsdp" else "two_ranks")(spread_run, kind, adaptive)
    for found in ranks:
        torch.testing.assert_close(found["totals"], expected["totals"], rtol=1e-5, atol=0.0)
        torch.testing.assert_close(found["rates"], expected["rates"], rtol=0.0, atol=1e-7)
        torch.testing.assert_close(found["memory"], expected["memory"], rtol=1e-5, atol=0.0, equal_nan=True)
        torch.testing.assert_close(found["weights"], expected["weights"], rtol=0.0, atol=1e-6)
    for part in ("totals", "rates", "memory"):
        for other in ranks[1:]:
            assert torch.equal(ranks[0][part].nan_to_num(-1.0), other[part].nan_to_num(-1.0))
