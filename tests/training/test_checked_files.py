"""Files of a checkpoint are compared with the manifest while ranks read them, whatever part of them each one reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import TrainerState

from olmo_hf.errors import DamagedCheckpointError
from olmo_hf.training import checked_files, checkpoints, commit
from olmo_hf.training.checked_files import CheckedFiles
from olmo_hf.training.disk import Disk
from olmo_hf.training.rotation import Keep
from olmo_hf.training.saving import CheckpointSaver
from olmo_hf.training.settling import describe_files
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.state import RunState
from olmo_hf.training.tensors import full_tensor, model_table, optimizer_table
from tests.training.test_commit import flip
from tests.training.test_memory_of_ranks import build

FILES, MODEL = ("sharded/__0_0.distcp", "sharded/__1_0.distcp"), "model.safetensors"


def save(rank: int, checkpoint: Path, kind: Any) -> None:
    """A checkpoint of a model that both ranks share; `one` is as a single process would have written it."""
    model, optimizer = build(64)
    if kind != "one":
        run = Snapshot(model=model, optimizer=optimizer, run_state=RunState(step=1), trainer_state=TrainerState())
        saver = CheckpointSaver(checkpoint.parent, keep=Keep(), disk=Disk((0, 1), is_writer=rank == 0))
        saver.save(run, kind=kind, has_optimizer=True)
        return
    table = {f"model.{name}": full_tensor(tensor) for name, tensor in model_table(model).items()}
    moments = optimizer_table(model, optimizer).items()
    table |= {f"optimizer.{name}": full_tensor(tensor) for name, tensor in moments}
    if rank == 0:
        dcp.save(table, storage_writer=dcp.FileSystemWriter(checkpoint / "sharded"), no_dist=True)
        files = describe_files(checkpoint, [FILES[0], "sharded/.metadata"])
        manifest = commit.Manifest(kind="sharded", step=1, tokens=1, world_size=1, files=files, versions={})
        commit.write_manifest(checkpoint, manifest)
    torch.distributed.barrier()


def save_and_restore(rank: int, folder: str, kind: str, damaged: str) -> list[Any]:
    """What was said of the damage; files that this rank read from end to end, and that it compared afterwards."""
    checkpoint = Path(folder) / "checkpoint-1"
    save(rank, checkpoint, kind)
    if damaged and rank == 0:
        size = (checkpoint / damaged).stat().st_size
        flip(damaged, size // 2)(checkpoint)
    torch.distributed.barrier()
    made: list[CheckedFiles] = []
    compared: list[str] = []
    problems_of = checked_files.problems_of

    class Watched(CheckedFiles):
        def __init__(self, checkpoint: Path):
            super().__init__(checkpoint)
            made.append(self)

    def watched(directory: Path, files: dict[str, Any]) -> Any:
        compared.extend(files)
        return problems_of(directory, files)

    model, optimizer = build(64)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(checkpoints, "CheckedFiles", Watched)
        changed.setattr(checked_files, "problems_of", watched)
        try:
            checkpoints.restore_tensors(checkpoint, model, optimizer)
        except DamagedCheckpointError as error:
            return [str(error), [], []]
    return ["", sorted(made[0]._whole), compared]


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        pytest.param("sharded", [[[FILES[0]], []], [[FILES[1]], []]], id="shards"),
        pytest.param("unsharded", [[[FILES[0]], [MODEL]], [[FILES[1]], []]], id="whole-model"),
        pytest.param("one", [[[FILES[0]], []], [[FILES[0]], []]], id="another-number-of-ranks"),
    ],
)
def test_each_file_is_compared_once(two_ranks: Any, tmp_path: Path, kind: str, read: list[Any]) -> None:
    """A rank's own file while that rank reads it; what both read in parts afterwards, by one of them. A file of a
    single process, in which no tensor is cut, both read whole."""
    assert [answer[1:] for answer in two_ranks(save_and_restore, str(tmp_path), kind, "")] == read


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [
        pytest.param("sharded", FILES[1], id="shard"),
        pytest.param("unsharded", FILES[0], id="moments"),
        pytest.param("unsharded", MODEL, id="whole-model"),
        pytest.param("one", FILES[0], id="another-number-of-ranks"),
    ],
)
def test_all_ranks_learn_of_damage(two_ranks: Any, tmp_path: Path, kind: str, damaged: str) -> None:
    told = f"{tmp_path}/checkpoint-1: {damaged} is damaged (checksum differs from manifest.json)"
    assert [answer[0] for answer in two_ranks(save_and_restore, str(tmp_path), kind, damaged)] == [told, told]
