"""Ranks that run functions of test modules: processes joined by gloo that stay, as starting them takes seconds."""

import io
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Who forks them imports once what every rank needs.
mp.get_context("forkserver").set_forkserver_preload(["olmo_hf.training.trainer"])


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
        context = mp.get_context("forkserver")
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
