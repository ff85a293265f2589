"""The large files of a checkpoint, compared with its manifest while they are read: none of them is read twice.

Who reads a file from its first byte to its last compares it on the way. Files of which everybody reads only a part are
compared afterwards, by the processes of each machine together, each some of them.
"""

import platform
from pathlib import Path

from olmo_hf.distributed import gather_objects, rank, run_on_all
from olmo_hf.errors import CheckpointError, DamagedCheckpointError
from olmo_hf.training.commit import damage_of, problems_of, read_manifest


class CheckedFiles:
    """What has been read of one checkpoint, and what was wrong with it.

    Args:
        checkpoint: the directory.

    Raises:
        CheckpointError: it has no manifest.
    """

    def __init__(self, checkpoint: Path):
        self.checkpoint = checkpoint
        self._files = read_manifest(checkpoint).files
        self._whole: set[str] = set()
        self._in_part: set[str] = set()
        self._damages: list[str] = []

    def read_whole(self, path: Path, checksum: str) -> None:
        """All of a file was read, and this is the checksum of what came.

        Raises:
            DamagedCheckpointError: it should be another.
        """
        name = str(path.relative_to(self.checkpoint))
        self._whole.add(name)
        if name in self._files and self._files[name]["xxh3_128"] != checksum:
            self._damages.append(damage_of(name))
            raise DamagedCheckpointError(f"{self.checkpoint}: {damage_of(name)}")

    def read_in_part(self, path: Path) -> None:
        """Some of a file was read."""
        self._in_part.add(str(path.relative_to(self.checkpoint)))

    def check_the_rest(self) -> None:
        """Compare the files that were read in parts only. All ranks call.

        Raises:
            DamagedCheckpointError: on all ranks: one of them is damaged.
        """
        here = gather_objects((self._place, sorted(self._whole), sorted(self._in_part)))
        alike = [(whole, in_part) for place, whole, in_part in here if place == self._place]
        read = {name for whole, _ in alike for name in whole}
        left = sorted({name for _, in_part in alike for name in in_part} - read)
        self._look_together_at(left)

    def explain(self) -> None:
        """Something went wrong while reading: find out whether that comes from damage. All ranks call.

        Raises:
            DamagedCheckpointError: on all ranks: a file is not as the manifest says, or was not when it was read.
        """
        self._look_together_at(sorted(self._files))

    @property
    def _place(self) -> str:
        """Processes for which this is the same surely read the same files."""
        return f"{platform.node()}:{self.checkpoint.resolve()}"

    def _look_together_at(self, names: list[str]) -> None:
        """Each process of a machine compares some of the files; all raise what any has found, now or before."""
        alike = [r for r, place in enumerate(gather_objects(self._place)) if place == self._place]
        own = {name: self._files[name] for name in names[alike.index(rank()) :: len(alike)] if name in self._files}
        found = run_on_all(lambda: list(problems_of(self.checkpoint, own)), _told)
        everywhere = [damage for part in gather_objects(self._damages + found) for damage in part]
        if everywhere:
            raise DamagedCheckpointError(f"{self.checkpoint}: {'; '.join(dict.fromkeys(everywhere))}")


def _told(messages: list[str]) -> CheckpointError:
    return CheckpointError("; ".join(messages))
