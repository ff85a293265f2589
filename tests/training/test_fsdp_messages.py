"""Messages of FSDP2 over gloo that go directly from rank to rank: the sums and copies of torch's own collectives."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from olmo_hf.training.fsdp_messages import DirectAllGather, DirectReduceScatter, leave_out_warning_of_views

N = 1001
"""Numbers that each rank holds."""


def gather(rank: int, dtype: torch.dtype, in_place: bool) -> dict[str, torch.Tensor]:
    """What both kinds give this rank."""
    group, size = dist.group.WORLD, dist.get_world_size()
    part = torch.randn(N, generator=torch.Generator().manual_seed(rank)).to(dtype)
    ours, torchs = torch.zeros(2, size * N, dtype=dtype)
    given = part
    if in_place:
        given = ours[rank * N : (rank + 1) * N]
        given.copy_(part)
    DirectAllGather()(ours, given, group)
    dist.all_gather_single(torchs, part, group=group)
    return {"ours": ours, "torchs": torchs}


def reduce(rank: int, dtype: torch.dtype, averaged: bool) -> dict[str, torch.Tensor]:
    """The sum over ranks of this rank's part, and its terms."""
    group, size = dist.group.WORLD, dist.get_world_size()
    terms = [torch.randn(size * N, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(size)]
    ours = torch.empty(N, dtype=dtype)
    DirectReduceScatter()(ours, terms[rank].clone(), group, dist.ReduceOp.AVG if averaged else dist.ReduceOp.SUM)
    expected = terms[0].clone()
    for term in terms[1:]:
        expected += term
    if averaged:
        expected /= size
    return {"ours": ours, "expected": expected[rank * N : (rank + 1) * N].clone()}


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in-place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_gathered(two_ranks: Any, dtype: torch.dtype, in_place: bool) -> None:
    for found in two_ranks(gather, dtype, in_place):
        assert torch.equal(found["ours"], found["torchs"])


@pytest.mark.parametrize("averaged", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reduced(two_ranks: Any, dtype: torch.dtype, averaged: bool) -> None:
    for found in two_ranks(reduce, dtype, averaged):
        assert torch.equal(found["ours"], found["expected"])


def test_four_ranks_sum_in_the_order_of_ranks(four_ranks: Any) -> None:
    """Not in the order in which messages arrive: a run and its repetition are the same bit for bit."""
    for _ in range(3):
        for found in four_ranks(reduce, torch.float32, True):
            assert torch.equal(found["ours"], found["expected"])
    for found in four_ranks(gather, torch.float32, False):
        assert torch.equal(found["ours"], found["torchs"])


def test_the_warning_of_views_alone_is_left_out() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        leave_out_warning_of_views()
        warnings.warn(
            "FSDP2-wrapped module (FSDPOlmoHfNorm, FSDPLinear) returned a view tensor. An in-place op", stacklevel=1
        )
        warnings.warn("something else of FSDP2", stacklevel=1)
    assert [str(one.message) for one in shown] == ["something else of FSDP2"]
