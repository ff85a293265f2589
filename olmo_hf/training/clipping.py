"""Gradient norms and clipping: by the global norm, or by each tensor's running norm. Nothing here waits for the GPU.

Norms are those of whole tensors, whatever part of a tensor a rank holds, so that clipping does not depend on how the
model is spread: plain gradients (one process, DDP) are complete, sharded ones (`DTensor` of FSDP2, HSDP) are summed
over the ranks that share a tensor and not over those that repeat it.

Shapes: `P` parameters, `G` clipping groups.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

_EPSILON = 1e-6
"""Added to a norm before dividing by it (spec: trainer.md section 6)."""

_FUSED_NAMES = (
    (re.compile(r"\b(q|k|v)_proj\b"), "qkv_proj"),
    (re.compile(r"\b(gate|up)_proj\b"), "gate_up_proj"),
)
"""Tensors that are split here and one tensor in the original trainer, which clips them as one."""


@dataclass(frozen=True)
class GradientNorms:
    """L2 norms of the gradients, the same on every rank."""

    per_parameter: torch.Tensor
    """(P,), float64 (float32 on MPS); 0 where there is no gradient."""

    total: torch.Tensor
    """Scalar: norm of all gradients together."""


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds; a plain tensor is held in full."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups over which the parts of a tensor add up to the whole; none for a plain or repeated tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    placements = tensor.placements
    assert not any(placement.is_partial() for placement in placements), "gradients are reduced before clipping"
    return tuple(tensor.device_mesh.get_group(i) for i, placement in enumerate(placements) if placement.is_shard())


def reduce_over_shards(
    local_values: torch.Tensor, tensors: Sequence[torch.Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Combines per-tensor values of local parts into values of whole tensors, with one collective per sharding.

    Args:
        local_values: (..., len(tensors)), from this rank's parts; changed in place.
        tensors: what they belong to, in the same order on every rank.
        op: how values of parts combine.

    Returns:
        The same values, the same on all ranks.
    """
    columns: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
    for column, tensor in enumerate(tensors):
        columns.setdefault(shard_groups(tensor), []).append(column)
    for groups, indices in columns.items():
        if not groups:
            continue
        everything = len(indices) == len(tensors)
        part = local_values if everything else local_values[..., indices].contiguous()
        for group in groups:
            dist.all_reduce(part, op=op, group=group)
        if not everything:
            local_values[..., indices] = part
    return local_values


def gradient_norms(parameters: Iterable[torch.nn.Parameter]) -> GradientNorms:
    """Norm of every gradient, and of all together, with one reduction.

    Parameters without a gradient count as 0; on a rank that holds no element of a tensor its part is 0 too.
    """
    parameters = list(parameters)
    device = parameters[0].device
    # Float64, so that summing over parameters and ranks adds no error of its own.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    with_gradient = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
    squares = torch.zeros(len(parameters), dtype=dtype, device=device)  # (P,)
    if with_gradient:
        gradients = [local_tensor(parameters[i].grad) for i in with_gradient]  # type: ignore[arg-type]
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).to(dtype)
        indices = torch.tensor(with_gradient).to(device, non_blocking=True)
        squares.index_copy_(0, indices, norms.square())
    squares = reduce_over_shards(squares, parameters)
    return GradientNorms(per_parameter=squares.sqrt(), total=squares.sum().sqrt())


def clip_by_global_norm(
    parameters: Sequence[torch.nn.Parameter], norms: GradientNorms, *, max_norm: float
) -> torch.Tensor:
    """Scales all gradients, in place, by `min(1, max_norm / (total + 1e-6))`.

    Args:
        parameters: those that `norms` was taken of.
        norms: what `gradient_norms` gave.
        max_norm: largest norm of all gradients together; 0.0 is off.

    Returns:
        Clipping rate: scalar float32 tensor, 1 if the gradients were scaled and 0 if not.
    """
    if max_norm == 0.0:
        return torch.zeros((), device=norms.total.device)
    coefficient = (max_norm / (norms.total + _EPSILON)).clamp(max=1.0).float()
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        # Multiplied also by 1: asking first would wait for the device at every step.
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].dtype))
    return (coefficient < 1.0).float()


def clip_group_name(name: str, clip_groups: Literal["fused", "parameter"] = "fused") -> str:
    """Name of the clipping group a parameter belongs to: q, k, v together and gate, up together, or each alone."""
    if clip_groups == "fused":
        for pattern, fused in _FUSED_NAMES:
            name = pattern.sub(fused, name)
    return name


class AdaptiveClipper:
    """Clips each group of tensors at a multiple of the running average of its clipped norms.

    With `n` the norm now, `e` the memory (at first `n` itself) and `c = min(1, ratio * e / (n + 1e-6))`, the gradient
    is multiplied by `c` and `e` moves to `e + (1 - beta) * (n * c - e)` (spec: trainer.md section 6). As in the
    original the memory begins with the second step of a run. Unlike it, a memory of zero counts as none (there such a
    tensor stayed frozen for ever), a norm that is not finite is not remembered, and starting in the middle of a run
    with a new optimizer is no special case.

    Args:
        names: names of the parameters that `clip` will be given, in that order.
        clip_groups: `fused` clips tensors together that are one tensor in the original; `parameter` each alone.
        beta: decay of the memory; the original takes the larger of the optimizer's two.
        device: where the gradients are.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        clip_groups: Literal["fused", "parameter"] = "fused",
        beta: float,
        device: torch.device | str = "cpu",
    ):
        group_of = [clip_group_name(name, clip_groups) for name in names]
        self.group_names = list(dict.fromkeys(group_of))
        self.beta = beta
        numbers = {group: number for number, group in enumerate(self.group_names)}
        self._members = torch.tensor([numbers[group] for group in group_of], device=device)  # (P,)
        self._memory = torch.full((len(self.group_names),), torch.nan, device=device)  # (G,); nan is none yet

    @property
    def running_norms(self) -> dict[str, torch.Tensor]:
        """Memory of each group, scalar float32 tensors; nan where there is none yet."""
        return dict(zip(self.group_names, self._memory.unbind(), strict=True))

    def clip(
        self, parameters: Sequence[torch.nn.Parameter], norms: GradientNorms, *, ratio: float, step: int
    ) -> torch.Tensor:
        """Scales the gradients in place and updates the memory.

        Args:
            parameters: in the order of `names`.
            norms: what `gradient_norms` gave for them.
            ratio: largest norm as a multiple of the memory.
            step: number of this update in the run, from 1.

        Returns:
            Clipping rate: scalar float32 tensor, the share of the groups that were scaled.
        """
        squares = torch.zeros_like(self._memory, dtype=norms.per_parameter.dtype)
        squares.index_add_(0, self._members, norms.per_parameter.square())
        norm = squares.sqrt().float()  # (G,)
        known = self._memory > 0
        memory = torch.where(known, self._memory, norm)
        limited = (ratio * memory / (norm + _EPSILON)).clamp(max=1.0)  # (G,)
        coefficient = torch.where(memory > 0, limited, 1.0)
        self._scale(parameters, coefficient)
        if step > 1:
            moved = memory + (1.0 - self.beta) * (norm * coefficient - memory)
            self._memory = torch.where(norm.isfinite() & (memory > 0), moved, self._memory)
        return ((coefficient < 1.0) & (norm > 0)).float().mean()

    def _scale(self, parameters: Sequence[torch.nn.Parameter], coefficient: torch.Tensor) -> None:
        per_parameter = coefficient[self._members].unbind()
        pairs = [
            (local_tensor(parameter.grad), factor)
            for parameter, factor in zip(parameters, per_parameter, strict=True)
            if parameter.grad is not None
        ]
        if pairs:
            gradients, factors = zip(*pairs, strict=True)
            torch._foreach_mul_(gradients, [f.to(g.dtype) for g, f in zip(gradients, factors, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        """The memory: names of the groups, and their running norms as one tensor (G,)."""
        return {"group_names": list(self.group_names), "running_norms": self._memory.detach().cpu().clone()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the memory over, by name; groups that the checkpoint does not know begin without one."""
        saved = dict(zip(state_dict["group_names"], state_dict["running_norms"].tolist(), strict=True))
        values = [saved.get(group, float("nan")) for group in self.group_names]
        self._memory = torch.tensor(values, dtype=torch.float32, device=self._memory.device)
