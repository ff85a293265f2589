"""One rank fails, and all of them end soon, saying which one it was and why.

A rank that is gone leaves the others waiting in a collective, on GPUs for as long as NCCL's patience lasts. So every
rank has a thread that asks the store of the rendezvous, over a connection of its own, whether somebody has failed.
With several nodes it also tells them that this one is alive, and one process looks whether a node has fallen silent.
"""

import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from olmo_hf.distributed import broadcast_object, is_distributed, rank, world_size

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
GRACE_SECONDS = 6.0
"""For ranks that fail together with the first one, and say so themselves."""

SILENCE_SECONDS = 40.0
"""A node that has told nothing for so long is given up."""

_watch: "FaultWatch | None" = None


class FaultWatch:
    """A thread that ends this process when another rank has failed.

    Args:
        store: connected to the same place on all ranks; used by nobody else.
        node: this rank's node.
        num_nodes: how many there are.
        speaks: whether this process tells that its node is alive.
        leave: ends this process with an exit code.
        launcher: process id of the launcher, where there is one; without it nobody would end this process.
    """

    def __init__(
        self,
        store: Any,
        *,
        node: int = 0,
        num_nodes: int = 1,
        speaks: bool = False,
        leave: Callable[[int], None] = os._exit,
        launcher: int | None = None,
    ):
        self._store, self._node, self._num_nodes, self._speaks = store, node, num_nodes, speaks
        self._leave, self._launcher = leave, launcher
        self._stop = threading.Event()
        self._announced = False
        self._heard = [(b"", time.monotonic())] * num_nodes
        self._thread = threading.Thread(target=self._run, name="fault-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """The end of the run: what happens to the others from now on is their own affair."""
        self._stop.set()
        self._thread.join(timeout=2 * POLL_SECONDS)

    def announce(self, message: str, exit_code: int) -> str | None:
        """Tell all ranks that this one fails.

        Returns:
            A sentence about the rank that failed before and so, most likely, made this one fail; None: there is none.
        """
        self._announced = True
        fault = json.dumps({"rank": rank(), "message": message, "exit_code": exit_code})
        try:
            if self._store.add("faults", 1) == 1:  # the first one is the cause, the others follow from it
                self._store.set("fault", fault)
                return None
            first = json.loads(self._store.get("fault"))
        except RuntimeError:  # nobody to tell
            return None
        return None if first["message"] == message else _because_of(first)

    def _run(self) -> None:
        beats = 0
        while not self._stop.wait(POLL_SECONDS):
            try:
                fault = self._look(beats)
                beats += 1
            except RuntimeError as error:
                fault = {
                    "rank": 0,
                    "exit_code": 1,
                    "message": f"the process that brought all together is gone: {error}",
                }
            if self._launcher is not None and os.getppid() != self._launcher:
                fault = {"rank": rank(), "exit_code": 1, "message": "the launcher of this process is gone"}
            if fault is not None and not self._announced:
                self._end(fault)
                return

    def _look(self, beats: int) -> dict[str, Any] | None:
        if self._num_nodes > 1 and self._speaks:
            self._store.set(f"beat{self._node}", str(beats))
            if self._node == 0:
                self._listen()
        return json.loads(self._store.get("fault")) if self._store.check(["fault"]) else None

    def _listen(self) -> None:
        """Look whether every node has spoken lately; until it has spoken once there is nothing to miss."""
        now = time.monotonic()
        for node in range(1, self._num_nodes):
            if not self._store.check([f"beat{node}"]):
                continue
            beat = self._store.get(f"beat{node}")
            if beat != self._heard[node][0]:
                self._heard[node] = (beat, now)
            elif now - self._heard[node][1] > SILENCE_SECONDS and self._store.add("faults", 1) == 1:
                said = f"node {node} has not been heard of for {SILENCE_SECONDS:.0f} s"
                self._store.set("fault", json.dumps({"rank": rank(), "message": said, "exit_code": 1}))

    def _end(self, fault: dict[str, Any]) -> None:
        if self._stop.wait(GRACE_SECONDS) or self._announced:
            return  # it failed by itself, or came to its end
        sys.stderr.write(f"{_because_of(fault)}\n")
        sys.stderr.flush()
        self._leave(int(fault["exit_code"]))


def _because_of(fault: dict[str, Any]) -> str:
    return f"rank {rank()} ends, because rank {fault['rank']} failed: {fault['message']}"


def start_fault_watch(leave: Callable[[int], None] = os._exit) -> None:
    """Begin to watch, where several processes take part. All ranks call.

    Args:
        leave: ends this process with an exit code.
    """
    global _watch
    if not is_distributed() or "MASTER_ADDR" not in os.environ:
        return
    token = broadcast_object(uuid.uuid4().hex)  # tells this launch from the one before over the same store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False)
    except RuntimeError as error:
        logger.warning("faults of other ranks will not be told: no TCPStore at %s:%d (%s)", address, port, error)
        return
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))
    _watch = FaultWatch(
        dist.PrefixStore(f"olmo_hf/{token}", store),
        node=rank() // local_size,
        num_nodes=-(-world_size() // local_size),
        speaks=rank() % local_size == 0,
        leave=leave,
        launcher=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None,
    )
    _watch.start()


def announce_fault(message: str, exit_code: int) -> str | None:
    """Tell all ranks, where there are others, that this one fails; returns what `FaultWatch.announce` does."""
    return _watch.announce(message, exit_code) if _watch is not None else None


def stop_fault_watch() -> None:
    """Stop watching."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
