"""What FSDP2 sends between ranks, made less: weights nobody needs are not gathered, and gloo is spoken to directly.

Shapes: `W` ranks of a shard group, `N` numbers that each of them holds.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from transformers import PreTrainedModel


class _Allocates:
    """Memory for messages: a tensor for every use."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class DirectAllGather(_Allocates, AllGather):
    """Every rank sends its part to every other one.

    gloo's own collective hands parts on from rank to rank and copies them on the way, which takes three times as long
    on one machine.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """(N,) -> (W * N,), which the input may lie in; done when it returns."""
        size, rank = group.size(), group.rank()
        parts = output_tensor.view(size, -1)  # (W, N)
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        messages = []
        for other in range(size):
            if other != rank:
                messages.append(dist.irecv(parts[other], group=group, group_src=other))
                messages.append(dist.isend(input_tensor, group=group, group_dst=other))
        _wait(messages)


class DirectReduceScatter(_Allocates, ReduceScatter):
    """Every rank sends each other one what that one is to add up; summed in the order of the ranks."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """(W * N,) -> (N,); done when it returns."""
        assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), op
        size, rank = group.size(), group.rank()
        parts = input_tensor.view(size, -1)  # (W, N)
        messages = [dist.isend(parts[i], group=group, group_dst=i) for i in range(size) if i != rank]
        received = torch.empty_like(output_tensor)  # (N,)
        for other in range(size):
            part = parts[rank]
            if other != rank:
                _wait([dist.irecv(received, group=group, group_src=other)])
                part = received
            output_tensor.copy_(part) if other == 0 else output_tensor.add_(part)
        _wait(messages)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(size)


def _wait(messages: Sequence[dist.Work | None]) -> None:
    for message in messages:
        assert message is not None, "only members of the group send"
        message.wait()


def leave_out_warning_of_views() -> None:
    """Torch warns of every unit whose result is a view, because adding to it in place would lose gradients.

    Nothing in the model or the losses changes such a result in place; `tests/invariants` holds losses, gradient norms
    and weights of FSDP2 to those of one process.
    """
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor", category=UserWarning)


def spare_messages(model: PreTrainedModel) -> None:
    """Does with less what FSDP2 would send by default, in place. Numbers stay the same.

    - The embedding's weights are not gathered for the backward pass: its gradient needs the ids only.
    - On CPUs, parts go directly from rank to rank.

    Args:
        model: sharded.
    """
    leave_out_warning_of_views()
    embedding = model.get_input_embeddings()
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))  # then it is in one unit with the head
    if isinstance(embedding, FSDPModule) and not is_tied:
        embedding.set_unshard_in_backward(False)
    if dist.get_backend() == "gloo":
        gather, reduce = DirectAllGather(), DirectReduceScatter()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)
