"""Which processes write to the same file system: what is done once per file system is done by one of them."""

import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from olmo_hf.distributed import barrier, broadcast_object, gather_objects, rank, run_on_all
from olmo_hf.errors import CheckpointError
from olmo_hf.training.commit import STAGING_PREFIX

PROBE = f"{STAGING_PREFIX}probe-"
PATIENCE_SECONDS = 3.0
"""A network file system may show what another machine wrote only after a while."""


@dataclass(frozen=True)
class Disk:
    """The file system of the run directory, seen from this process."""

    ranks: tuple[int, ...] = (0,)
    """Processes that see the same files as this one, itself included."""

    is_writer: bool = True
    """Whether this is the one process that writes what is written once."""


def find_disk(run_dir: Path) -> Disk:
    """Find out who shares the run directory, by leaving files there and looking whose can be seen. All ranks call.

    The first process of every machine leaves a file; each process belongs to the lowest rank whose file it sees.

    Raises:
        CheckpointError: on all ranks: a process cannot write there, or sees no file at all.
    """
    token = broadcast_object(uuid.uuid4().hex)
    leaves_file = int(os.environ.get("LOCAL_RANK", "0")) == 0
    own = run_dir / f"{PROBE}{token}-{rank()}"

    def leave() -> None:
        if leaves_file:
            run_dir.mkdir(parents=True, exist_ok=True)
            own.write_bytes(b"")

    def failed(messages: list[str]) -> CheckpointError:
        return CheckpointError(
            f"{run_dir}: cannot write here ({'; '.join(messages)}); set training.output_dir to a directory that every "
            "machine may write"
        )

    run_on_all(leave, failed)
    leader = run_on_all(lambda: _lowest_visible(run_dir, token), failed)
    barrier()
    if leaves_file:
        own.unlink(missing_ok=True)
    leaders = gather_objects(leader)
    return Disk(tuple(r for r, other in enumerate(leaders) if other == leader), is_writer=leader == rank())


def _lowest_visible(run_dir: Path, token: str) -> int:
    """The lowest rank whose file is visible; rank 0's is waited for."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        names = os.listdir(run_dir) if run_dir.is_dir() else []
        seen = [int(name.rpartition("-")[2]) for name in names if name.startswith(f"{PROBE}{token}-")]
        if 0 in seen or time.monotonic() > deadline:
            if not seen:
                raise CheckpointError(
                    f"{run_dir}: a file that this machine writes there cannot be seen; set training.output_dir to a "
                    "disk that shows what is written"
                )
            return min(seen)
        time.sleep(0.05)
