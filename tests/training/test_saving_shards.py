"""Ranks that write a checkpoint together: when one of them cannot, all say so and nothing that existed is harmed."""

import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState

from olmo_hf.distributed import barrier
from olmo_hf.errors import CheckpointError
from olmo_hf.training import commit
from olmo_hf.training.disk import Disk
from olmo_hf.training.rotation import Keep
from olmo_hf.training.saving import CheckpointSaver
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.state import RunState
from tests.training.test_memory_of_ranks import build


def save_twice(rank: int, folder: str, in_background: bool) -> list[Any]:
    """The second time the system lets rank 1 write no file as large as its part; what both say, and what is left."""
    run_dir = Path(folder)
    model, optimizer = build(64)
    disk = Disk((0, 1), is_writer=rank == 0)
    saver = CheckpointSaver(run_dir, keep=Keep(), disk=disk, in_background=in_background)

    def save(step: int) -> str:
        state = TrainerState(global_step=step)
        run = Snapshot(model=model, optimizer=optimizer, run_state=RunState(step=step), trainer_state=state)
        try:
            saver.save(run, kind="sharded", has_optimizer=True)
            if saver._thread is not None:
                saver._thread.join()
                saver.poll()
        except CheckpointError as error:
            return str(error)
        return ""

    said = [save(1)]
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))
    try:
        said.append(save(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    barrier()
    commit.verify(run_dir / "checkpoint-1")
    return [*said, sorted(path.name for path in run_dir.iterdir())]


@pytest.mark.parametrize("in_background", [False, True], ids=["at-once", "in-the-background"])
def test_a_rank_that_cannot_write_stops_all(two_ranks: Any, tmp_path: Path, in_background: bool) -> None:
    for first, second, left in two_ranks(save_twice, str(tmp_path), in_background):
        assert first == ""
        assert f"cannot write {tmp_path}/checkpoint-2" in second
        assert "rank 1: " in second
        assert "Older checkpoints are untouched" in second
        assert "Traceback" not in second
        assert left == ["checkpoint-1", "latest"], "the space of the failed attempt is given back"
