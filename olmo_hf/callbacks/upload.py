"""The record of a run kept elsewhere too: metrics, events, settings and indices, while it goes on."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import UploadArgs
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.training.upload import Storage

logger = logging.getLogger(__name__)

RECORDS = (
    *("config.yaml", "launches.jsonl", "metrics.jsonl", "events.jsonl", "tracker_run_id"),
    *("data-indices/*", "loss-spikes/*", "heartbeat/*", "profiler/*", "model-outputs/*"),
)
"""What is copied, as patterns in the run directory; checkpoints are `training.upload_to`'s."""

LAST_SECONDS = 60.0
"""How long the end of a launch waits for the last copies."""


class Upload(OlmoCallback):
    """Copies the files that have changed, every `interval_seconds`, in a thread for which training never waits.

    Rank 0 copies what it sees in the run directory. A copy that fails is told once and tried again the next time.

    Args:
        run_dir: directory of the run.

    Raises:
        CheckpointError: the address cannot be reached from here.
    """

    def __init__(self, args: UploadArgs, *, run_dir: Path):
        self._storage = Storage(args.to)
        self._interval_seconds = args.interval_seconds
        self._run_dir = run_dir
        self._copied: dict[Path, tuple[int, int]] = {}  # size and time of change when it was copied
        self._failed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._work, args=(self._stop,), name="upload-record", daemon=True)
            self._thread.start()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._finish()

    def on_failure(self, state: TrainerState) -> None:
        self._finish()

    def _finish(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(LAST_SECONDS)
        if self._thread.is_alive():
            logger.warning("The last copies to %s take too long and are given up.", self._storage.url)
        self._thread = None

    def _work(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval_seconds):
            self.copy_changed()
        time.sleep(0.1)  # what other callbacks write at the very end
        self.copy_changed()

    def copy_changed(self) -> None:
        """Copies what is new since the last time."""
        try:
            for pattern in RECORDS:
                for path in sorted(self._run_dir.glob(pattern)):
                    self._copy(path)
            self._failed = False
        except Exception as error:  # whatever the storage's client raises
            if not self._failed:
                logger.warning("The record cannot be copied to %s (%s); trying again.", self._storage.url, error)
            self._failed = True

    def _copy(self, path: Path) -> None:
        found = path.stat()
        version = (found.st_size, found.st_mtime_ns)
        if not path.is_file() or self._copied.get(path) == version:
            return
        target = self._storage.path(*path.relative_to(self._run_dir).parts)
        self._storage.filesystem.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._storage.filesystem.put_file(str(path), target)
        self._copied[path] = version
