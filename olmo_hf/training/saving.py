"""Saves a run's checkpoints one after another: at once, or in the background while training goes on."""

import logging
import threading
from pathlib import Path

import torch

from olmo_hf.distributed import (
    agreement_among,
    all_reduce_sum,
    barrier,
    gather_objects,
    is_distributed,
    is_main_process,
    new_cpu_group,
    run_on_all,
)
from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit, rotation
from olmo_hf.training.checkpoints import write_checkpoint
from olmo_hf.training.disk import Disk, find_disk
from olmo_hf.training.snapshot import Contents, Copies, Snapshot, take
from olmo_hf.training.upload import Uploader

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 60.0
"""Time a save in the background is given when training has failed."""


def build_saver(
    run_dir: Path, *, keep: rotation.Keep, in_background: bool = False, upload_to: str | None = None
) -> "CheckpointSaver":
    """A saver for this launch. All ranks call.

    Args:
        run_dir: the run directory.
        keep: how many permanent checkpoints stay.
        in_background: whether training goes on while a checkpoint is written.
        upload_to: address of the directory that mirrors the run directory; None: there is none.

    Raises:
        CheckpointError: on all ranks: the directory cannot be written or the address not reached.
    """
    disk = find_disk(run_dir) if is_distributed() else Disk()
    uploader = None
    if upload_to is not None:
        writers = [r for r, writes in enumerate(gather_objects(disk.is_writer)) if writes]
        agree = agreement_among(writers)
        uploader = run_on_all(
            lambda: Uploader(upload_to, puts_manifest=is_main_process(), agree=agree) if disk.is_writer else None,
            lambda messages: CheckpointError(f"training.upload_to: {messages[0]}"),
        )
    return CheckpointSaver(run_dir, keep=keep, disk=disk, in_background=in_background, uploader=uploader)


class CheckpointSaver:
    """Writes, commits, rotates and hands on to the upload. All ranks make one and call the same methods.

    Args:
        run_dir: the run directory.
        keep: how many permanent checkpoints stay.
        disk: who writes to the same file system.
        in_background: whether `save` returns as soon as the tensors are copied.
        uploader: takes what is on disk elsewhere; None: nothing is taken anywhere.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep: rotation.Keep,
        disk: Disk,
        in_background: bool = False,
        uploader: Uploader | None = None,
    ):
        self.run_dir = run_dir
        self.keep = keep
        self.disk = disk
        self.uploader = uploader
        self._copies = Copies() if in_background else None
        self._group = new_cpu_group() if in_background else None
        self._thread: threading.Thread | None = None
        self._sweeper: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._told_memory = False

    def save(self, snapshot: Snapshot, *, kind: commit.Kind, has_optimizer: bool, wait: bool = False) -> Path:
        """Write a checkpoint. In the background an earlier one is waited for: there are never two at once.

        Args:
            snapshot: the run as it stands.
            kind: what is written.
            has_optimizer: whether a run can go on from it.
            wait: whether it is whole on return, also when saving in the background.

        Raises:
            CheckpointError: on all ranks: it, or the one before in the background, cannot be written.
        """
        self.wait()
        final = commit.checkpoint_path(self.run_dir, snapshot.run_state.step)
        copies = None if wait else self._copies
        contents = take(snapshot, kind=kind, has_optimizer=has_optimizer, is_writer=self.disk.is_writer, copies=copies)
        if copies is None:
            self._write(contents, None)
            barrier()
            return final
        self._tell_memory(copies)
        self._thread = threading.Thread(target=self._write_quietly, args=(contents,), name="checkpoint", daemon=True)
        self._thread.start()
        return final

    def poll(self) -> None:
        """Raise what went wrong in the background. A collective, as long as a save is under way; once a step."""
        if self._thread is None:
            return
        running = self._thread.is_alive()
        failed = not running and self._failure is not None
        still_running, failures = all_reduce_sum(torch.tensor([float(running), float(failed)])).tolist()
        if failures > 0 or still_running == 0:
            self.wait()
        if failures > 0:
            raise CheckpointError("another process could not finish a checkpoint; its own message says why")

    def wait(self) -> None:
        """Wait for the save in the background, and until what it made superfluous is deleted.

        Raises:
            CheckpointError: it failed.
        """
        if self._thread is not None:
            self._thread.join()
        if self._sweeper is not None:
            self._sweeper.join()
        self._thread = self._sweeper = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """At the end of training: wait for the save in the background and for the uploads."""
        self.wait()
        if self.uploader is not None:
            self.uploader.finish()

    def give_up(self) -> None:
        """Training has failed: let what is being written come to its end, but not for ever."""
        if self._thread is not None:
            self._thread.join(timeout=None if not is_distributed() else LAST_WORDS_SECONDS)
        if self.uploader is not None:
            self.uploader.stop(timeout_seconds=LAST_WORDS_SECONDS)

    def _write_quietly(self, contents: Contents) -> None:
        try:
            self._write(contents, self._group)
        except CheckpointError as error:
            self._failure = error
        except BaseException as error:  # nobody sees an exception in a thread; the next step raises it
            self._failure = CheckpointError(f"step {contents.step}: the checkpoint could not be written ({error})")

    def _write(self, contents: Contents, group: torch.distributed.ProcessGroup | None) -> None:
        manifest = write_checkpoint(self.run_dir, contents, disk=self.disk, group=group)
        if not self.disk.is_writer:
            return
        final = commit.checkpoint_path(self.run_dir, contents.step)
        if self.uploader is not None:
            self.uploader.submit(final, manifest)
        protected = self.uploader.in_use if self.uploader is not None else ()
        aside: list[Path | None] = []
        rotation.rotate(
            self.run_dir,
            newest=final,
            keep=self.keep,
            protected=protected,
            remove=lambda path: aside.append(commit.put_aside(path)),
        )
        self._sweep([trash for trash in aside if trash is not None])

    def _sweep(self, trash: list[Path]) -> None:
        """Delete what was put aside; training does not wait, for that can take as long as writing a new one."""
        if trash:
            self._sweeper = threading.Thread(target=lambda: [commit.delete(path) for path in trash], name="sweeper")
            self._sweeper.start()

    def _tell_memory(self, copies: Copies) -> None:
        if not self._told_memory and is_main_process():
            logger.info("checkpoints in the background hold a copy of %s bytes on rank 0", f"{copies.held_bytes:,}")
        self._told_memory = True
