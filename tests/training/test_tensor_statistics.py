"""Statistics of every tensor, as the original recorded them, and the same from shards."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from olmo_hf.training.clipping import AdaptiveClipper, gradient_norms
from olmo_hf.training.parameter_groups import parameter_groups
from olmo_hf.training.tensor_statistics import detailed_metrics, tensor_statistics

GOLDEN = Path(__file__).parent.parent / "golden" / "08_clipping"


def test_recorded_metrics():
    run = json.loads((GOLDEN / "index.json").read_text())["adaptive_1_05"]
    recorded = np.load(GOLDEN / "adaptive_1_05.metrics.npz")
    column = {str(name): i for i, name in enumerate(recorded["metric_names"])}
    gradients, weights = np.load(GOLDEN / "gradients.npz"), load_file(GOLDEN / "weights.safetensors")
    parameters = {name: nn.Parameter(weights[name]) for group in run["groups"] for name in group["param_names"]}
    groups = [{**g, "params": [parameters[name] for name in g["param_names"]]} for g in run["groups"]]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    clipper, tensors = AdaptiveClipper(list(parameters), clip_groups="parameter", beta=0.95), list(parameters.values())
    compared = set()
    for step in range(1, 13):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(gradients[f"step{step:02d}/{name}"]).clone()
        metrics = detailed_metrics(optimizer)
        clipper.clip(tensors, gradient_norms(tensors), ratio=1.05, step=step)
        optimizer.step()
        for name, value in metrics.items():
            name = name.removeprefix("optim/")
            # Means and smallest values are what is left of cancelling terms; the norm bounds the size of those.
            norm = metrics[f"optim/{name.rsplit('.', 1)[0]}.norm"] if name.endswith((".avg", ".min")) else 0.0
            expected = recorded["values"][step - 1][column[name]]
            assert value == pytest.approx(expected, rel=2e-6, abs=1e-7 * norm), (step, name)
            compared.add(name)
    left_out = {name for name in column if name not in compared}
    assert left_out == {"clipping_rate", "total_grad_norm"} | {f"grad_norm_exp_avg/{name}" for name in parameters}


def test_moments_that_do_not_exist_yet_are_left_out():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, weight_decay=0.1, decay_norm_and_bias=True, decay_embeddings=False)
    )
    metrics = detailed_metrics(optimizer)
    assert set(metrics) == {f"optim/param/{n}.{s}" for n in ("bias", "weight") for s in ("norm", "avg", "max", "min")}


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1, bias=False))


def sharded_statistics(rank):
    model = build_model()
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    assert model[2].weight.to_local().numel() == (7 if rank == 0 else 0)
    return tensor_statistics(list(model.parameters()))


def test_shards_add_up_to_the_whole(two_ranks):
    expected = tensor_statistics(list(build_model().parameters()))
    for rank, found in enumerate(two_ranks(sharded_statistics)):
        for statistic, values in expected.items():
            torch.testing.assert_close(found[statistic], values, rtol=1e-6, atol=1e-8, msg=f"{rank} {statistic}")
