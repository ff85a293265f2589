"""Norm, extremes and mean of every gradient, parameter and moment, by the original's names, in two collectives.

Too dear for every step; every ten or hundred they tell which tensor misbehaves.

Shapes: `T` tensors.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from olmo_hf.training.clipping import local_tensor, reduce_over_shards

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def tensor_statistics(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Statistics of whole tensors, sharded or not, the same on every rank.

    Args:
        tensors: none of them empty as a whole.

    Returns:
        `norm` (L2), `min` and `max` (of absolute values), `avg` (of values): each (T,), on the device.
    """
    local = [local_tensor(tensor).detach() for tensor in tensors]
    device = local[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    sums = torch.zeros(2, len(local), dtype=dtype, device=device)  # (2, T): squares, values
    extremes = torch.empty(2, len(local), device=device)  # (2, T): largest, negated smallest
    extremes[0], extremes[1] = 0.0, -torch.inf
    present = [i for i, part in enumerate(local) if part.numel() > 0]
    if present:
        parts = [local[i] for i in present]
        norms = torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32)).to(dtype)
        means = torch.stack([part.sum(dtype=torch.float32) for part in parts]).to(dtype)
        smallest, largest = zip(*(part.abs().aminmax() for part in parts), strict=True)
        indices = torch.tensor(present).to(device, non_blocking=True)
        sums.index_copy_(1, indices, torch.stack([norms.square(), means]))
        extremes.index_copy_(1, indices, torch.stack([torch.stack(largest), -torch.stack(smallest)]).float())
    reduce_over_shards(sums, tensors)
    reduce_over_shards(extremes, tensors, dist.ReduceOp.MAX)
    numel = torch.tensor([tensor.numel() for tensor in tensors], dtype=dtype).to(device, non_blocking=True)
    return {"norm": sums[0].sqrt(), "avg": sums[1] / numel, "max": extremes[0], "min": -extremes[1]}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Gradients, parameters and moments by name: `grad/{parameter}`, `param/...`, `exp_avg/...`, `exp_avg_sq/...`.

    What does not exist (yet) is left out. Groups must carry `param_names`.
    """
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            if parameter.grad is not None:
                found[f"grad/{name}"] = parameter.grad
            found[f"param/{name}"] = parameter
            state = optimizer.state.get(parameter, {})
            found.update({f"{key}/{name}": state[key] for key in _MOMENTS if key in state})
    return found


def detailed_metrics(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """`optim/{grad|param|exp_avg|exp_avg_sq}/{parameter}.{norm|min|max|avg}` (spec: trainer.md section 7).

    Called before clipping, as in the original: gradients as they came, parameters and moments before the update. A
    collective on sharded parameters, and one read of the device.
    """
    tensors = optimizer_tensors(optimizer)
    statistics = tensor_statistics(list(tensors.values()))
    values = torch.stack([values.to(statistics["norm"].dtype) for values in statistics.values()]).tolist()
    return {
        f"optim/{name}.{statistic}": row[column]
        for statistic, row in zip(statistics, values, strict=True)
        for column, name in enumerate(tensors)
    }
