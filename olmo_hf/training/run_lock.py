"""One process trains in a run directory at a time."""

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from olmo_hf.errors import CheckpointError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for this process; the system lets go of it however the process ends.

    Raises:
        CheckpointError: another process trains in this directory, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(run_dir / ".lock", "a+", encoding="utf-8")  # noqa: SIM115  (entered below)
    except OSError as error:
        raise CheckpointError(
            f"{run_dir}: cannot write here ({error.strerror}); set training.output_dir to a directory you may write"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise CheckpointError(
                f"{run_dir}: {owner} is training here already; wait for it, stop it, or choose another name"
            ) from None
        except OSError as error:  # a file system without locks: say so, and trust the user
            logger.warning("cannot lock %s: %s", run_dir, error)
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()
        yield
