"""No rank ever holds the whole optimizer: memory of two ranks that share a model, while they save and read back.

Saving at once is measured by torch's own record of allocations: the process's memory also has what the allocator keeps
of tensors that are gone. That record covers one thread, so that reading, and saving in another thread, are measured by
the process.
"""

import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers import TrainerState

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.checkpoints import restore_tensors
from olmo_hf.training.commit import checkpoint_path
from olmo_hf.training.disk import Disk
from olmo_hf.training.rotation import Keep
from olmo_hf.training.saving import CheckpointSaver
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.state import RunState
from olmo_hf.training.tensors import local_bytes, optimizer_table
from tests.training.conftest import _peak_bytes


class ExtraMemory:
    """The largest growth of the process's own memory in a `with` block, in bytes."""

    def __enter__(self) -> "ExtraMemory":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was given back to the allocator does not count as free here
        self._start, self.bytes = self._own(), 0
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def _own(self) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, self._own() - self._start)


def build(width: int) -> tuple[OlmoHfForCausalLM, torch.optim.AdamW]:
    """A model of which this rank holds its part, with moments."""
    torch.manual_seed(0)
    config = OlmoHfConfig(
        vocab_size=2000,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 64,
    )
    model = OlmoHfForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """This rank's parts."""
    return [state[key].to_local() for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def save_and_read_back(rank: int, run_dir: str, width: int, kind: Any, in_background: bool) -> list[int]:
    """Bytes: this rank's part of the optimizer, the whole model, the largest tensor; peaks of saving and reading."""
    model, optimizer = build(width)
    own = local_bytes(optimizer_table(model, optimizer))
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    run = Snapshot(model=model, optimizer=optimizer, run_state=RunState(step=1), trainer_state=TrainerState())
    saver = CheckpointSaver(
        Path(run_dir), keep=Keep(), disk=Disk((0, 1), is_writer=rank == 0), in_background=in_background
    )

    def save() -> None:
        saver.save(run, kind=kind, has_optimizer=True)
        saver.wait()

    if in_background:
        with ExtraMemory() as extra:
            save()
        saving = extra.bytes
    else:
        saving = _peak_bytes(save)
    torch.distributed.barrier()
    checkpoint = checkpoint_path(Path(run_dir), 1)
    before = [moment.clone() for moment in moments(optimizer)]
    optimizer.state.clear()
    with ExtraMemory() as reading:
        restore_tensors(checkpoint, model, optimizer)
    after = moments(optimizer)
    assert len(before) == len(after) == 2 * len(sizes)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return [own, sum(sizes), max(sizes), saving, reading.bytes]


@pytest.mark.parametrize(
    ("kind", "in_background"),
    [("sharded", False), ("unsharded", False), ("sharded", True)],
    ids=["sharded", "unsharded", "in-the-background"],
)
def test_no_rank_holds_the_whole_optimizer(two_ranks: Any, tmp_path: Path, kind: str, in_background: bool) -> None:
    slack = 12 << 20  # buffers of files and of the interpreter
    for rank, (own, model, largest, saving, reading) in enumerate(
        two_ranks(save_and_read_back, str(tmp_path / "run"), 512, kind, in_background)
    ):
        whole = 2 * own
        assert whole > 100 << 20, "large beside the slack"
        held = own + model // 2 if in_background else 0  # a copy of this rank's part
        gathered = model if kind == "unsharded" and rank == 0 else 0  # the model, which `from_pretrained` reads whole
        print(f"rank {rank}: own {own:,} saving {saving:,} reading {reading:,} largest {largest:,} model {model:,}")
        assert saving < held + gathered + 5 * largest + (slack if in_background else 0)  # a gathered one, its parts
        assert reading < own + 3 * largest + slack, "what it holds in the end, and little more"
        assert reading < 0.75 * whole
