"""Data loader workers when somebody asks the run to stop, and when it ends."""

import atexit
import functools
import multiprocessing
import os
import signal
import time
from types import FrameType

_SAME_REQUEST_SECONDS = 3.0
_GRACE_SECONDS = 60


def outlive_first_request(worker_id: int) -> None:
    """A `worker_init_fn`: lets the first SIGTERM, every SIGINT and every SIGUSR1 pass.

    A scheduler or a terminal signals the whole group of processes, workers too. They must live on, because their
    parent still finishes its step and writes a checkpoint; it ends them itself. As torch does it, a worker would die
    at once and the parent fail over that. A timer makes sure that a worker whose parent does not end it is gone after
    a minute; a second SIGTERM, more than three seconds later, ends it at once.
    """
    first_at: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not first_at:
            first_at.append(time.monotonic())
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(_GRACE_SECONDS)
        elif time.monotonic() - first_at[0] > _SAME_REQUEST_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


@functools.cache
def end_workers_at_exit() -> None:
    """Sees to it that no worker holds up the end of this process, however it ends.

    What `multiprocessing` does at exit is to send SIGTERM and wait: a worker that lets the first one pass would be
    waited for until its timer.
    """
    # Called before the function of `multiprocessing`, which was registered earlier.
    atexit.register(_end_workers)


def _end_workers() -> None:
    workers = [child for child in multiprocessing.active_children() if child.daemon]
    if not workers:
        return
    # Torch raises when a worker ends by a signal.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join()
