"""What the tests of training share: a measure of memory, and two or four ranks."""

import io
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile


def _peak_bytes(function: Callable[[], object]) -> int:
    """Largest amount of memory held at one time while `function` runs, by the profiler's record of allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as recorder:
        function()
    held = peak = 0
    events = [event for event in recorder.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """The function that measures the memory a function needs."""
    return _peak_bytes


def _serve(rank: int, count: int, folder: str, inbox: Any, outbox: Any) -> None:
    """One of the ranks: runs the functions it is sent until it is sent None."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    while (task := inbox.get()) is not None:
        function, args = task
        try:
            buffer = io.BytesIO()
            torch.save(function(rank, *args), buffer)
            outbox.put((True, buffer.getvalue()))
        except BaseException:
            outbox.put((False, traceback.format_exc()))
    dist.destroy_process_group()


class JoinedRanks:
    """Processes joined by gloo; called with a function of a test module and its arguments."""

    def __init__(self, count: int, folder: str):
        context = mp.get_context("forkserver")  # which imports once what every rank needs
        context.set_forkserver_preload(["olmo_hf.training.trainer"])
        self._inboxes, self._outboxes = ([context.Queue() for _ in range(count)] for _ in range(2))
        self._processes = [
            context.Process(
                target=_serve, args=(rank, count, folder, self._inboxes[rank], self._outboxes[rank]), daemon=True
            )
            for rank in range(count)
        ]
        for process in self._processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns on each rank (tensors, numbers and containers of them)."""
        for inbox in self._inboxes:
            inbox.put((function, args))
        answers = [outbox.get(timeout=300) for outbox in self._outboxes]
        for ok, answer in answers:
            assert ok, answer
        return [torch.load(io.BytesIO(answer), weights_only=True) for _, answer in answers]

    def close(self) -> None:
        """Ends the processes."""
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self._processes:
            process.join(timeout=30)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedRanks]:
    """Two ranks, started once for all tests of this folder: starting them takes longer than most tests."""
    ranks = JoinedRanks(2, str(tmp_path_factory.mktemp("ranks")))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JoinedRanks]:
    """Four ranks, for what is spread two ways."""
    ranks = JoinedRanks(4, str(tmp_path_factory.mktemp("four-ranks")))
    yield ranks
    ranks.close()
