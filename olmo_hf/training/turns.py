"""Processes of one machine that read one after another, where its memory is too short for the buffers of all."""

import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from olmo_hf.distributed import world_size

logger = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")
MEMORY_INFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Memory that this machine can still give, or what is left of the limit of a container; page cache is free."""
    _, _, rest = MEMORY_INFO.read_text().partition("MemAvailable:")
    machine = int(rest.split()[0]) * 1024
    try:
        limit = int((CGROUP / "memory.max").read_text())  # "max": there is none
        used = int((CGROUP / "memory.current").read_text())
        cache = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()).get("file", "0")
    except (OSError, ValueError):
        return machine
    return min(machine, limit - used + int(cache))


@contextmanager
def own_turn(buffer_bytes: int) -> Iterator[bool]:
    """Let this process read when the memory for it is there; yields whether it had to take turns.

    The system gives the turn on when a process ends, however it ends.

    Args:
        buffer_bytes: what this process holds for a moment, beside what it keeps.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size())))
    if processes == 1 or processes * buffer_bytes <= available_bytes():
        yield False
        return
    logger.warning(
        "memory is short: the %d processes of this machine read one after another, %s bytes at a time",
        processes,
        f"{buffer_bytes:,}",
    )
    launch = f"{os.getuid()}-{os.environ.get('MASTER_PORT', '')}"
    with open(Path(tempfile.gettempdir()) / f"olmo-hf-turn-{launch}", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield True
