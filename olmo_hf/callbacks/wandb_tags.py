"""Whether somebody has tagged the run on Weights & Biases: asked in the background, so that nothing waits for it."""

import logging
import sys
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

CANCEL_TAGS = frozenset({"cancel", "canceled", "cancelled"})
_REQUEST_TIMEOUT_SECONDS = 15


def current_tags() -> set[str]:
    """Tags of this process's run as the server knows them now; empty without a run that is online.

    A run object does not see tags that others add, and an `Api` object caches; so a new one asks every time.
    """
    wandb = sys.modules.get("wandb")
    if wandb is None or wandb.run is None or wandb.run.settings._offline:
        return set()
    run = wandb.run
    found = wandb.Api(timeout=_REQUEST_TIMEOUT_SECONDS).run(f"{run.entity}/{run.project}/{run.id}")
    return {str(tag).lower() for tag in found.tags}


class TagWatch:
    """Asks every `seconds` on a thread of its own; `found` is true once a cancelling tag was seen.

    Whatever goes wrong (network, server, permissions) only means that nothing was seen this time.
    """

    def __init__(self, seconds: float, tags: Callable[[], set[str]] = current_tags):
        self._seconds = seconds
        self._tags = tags
        self._found = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def found(self) -> bool:
        """Whether a cancelling tag has been seen."""
        return self._found.is_set()

    def start(self) -> None:
        """Begins to ask."""
        self._thread = threading.Thread(target=self._watch, name="wandb-tags", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends asking; does not wait for a request under way."""
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                if self._tags() & CANCEL_TAGS:
                    self._found.set()
                    return
            except Exception as error:
                logger.debug("Tags of the run could not be read: %s", error)
