"""The floor: the matrix products of a training step and nothing else, with the shapes of the work.

Forward once, backward twice (by the input and by the weight); attention's two products in full, not by halves.
"""

import time
from collections.abc import Callable

import torch
from workloads import WORKLOADS, Workload, rival_options, tell


def products(work: Workload) -> list[tuple[Callable[[], object], int]]:
    """Every product of a micro-batch as (call, times), all writing into memory that exists already."""
    positions = work.micro_batch * work.sequence_length
    width, inner, layers = work.hidden_size, work.intermediate_size, work.num_layers
    found: list[tuple[Callable[[], object], int]] = []
    for (inside, outside), times in {
        (width, width): 4 * layers,
        (width, inner): 2 * layers,
        (inner, width): layers,
        (width, work.vocab_size): 1,
    }.items():
        x, y = torch.randn(positions, inside), torch.randn(positions, outside)
        weight, gradient = torch.randn(outside, inside), torch.randn(outside, inside)
        found.append((lambda x=x, y=y, weight=weight: torch.mm(x, weight.T, out=y), times))
        found.append((lambda x=x, y=y, weight=weight: torch.mm(y, weight, out=x), times))
        found.append((lambda x=x, y=y, gradient=gradient: torch.mm(y.T, x, out=gradient), times))
    heads, size, length = work.micro_batch * work.num_heads, width // work.num_heads, work.sequence_length
    query, scores = torch.randn(heads, length, size), torch.randn(heads, length, length)
    found.append((lambda: torch.bmm(query, query.transpose(1, 2), out=scores), 2 * layers))
    found.append((lambda: torch.bmm(scores, query, out=query), 4 * layers))
    return found


def main() -> None:
    options = rival_options()
    work = WORKLOADS[options.workload]
    calls = products(work)
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        for _ in range(work.accumulation):
            for call, times in calls:
                for _ in range(times):
                    call()
        seconds.append(time.perf_counter() - start)
    tell(seconds)


if __name__ == "__main__":
    main()
