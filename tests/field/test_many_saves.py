"""A run that saves often keeps no memory of it."""

import gc
from pathlib import Path

import psutil
import pytest
import torch
from transformers import TrainerState

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training import commit
from olmo_hf.training.disk import Disk
from olmo_hf.training.rotation import Keep
from olmo_hf.training.saving import CheckpointSaver
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.state import RunState

ALLOWED_BYTES = 10 * 2**20
"""A sixth of what one checkpoint holds: a single one that is kept would show."""


def live_tensors() -> int:
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize(
    ("in_background", "saves"),
    [
        pytest.param(False, 15, id="at-once"),
        pytest.param(True, 15, id="in-the-background"),
        pytest.param(False, 40, id="at-once-forty", marks=pytest.mark.slow),
        pytest.param(True, 40, id="in-the-background-forty", marks=pytest.mark.slow),
    ],
)
def test_memory_does_not_grow_with_the_number_of_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool, saves: int
) -> None:
    config = OlmoHfConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4
    )
    model = OlmoHfForCausalLM(config)
    assert 20e6 < 4 * sum(parameter.numel() for parameter in model.parameters()) < 22e6
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    # The disk is not what is measured, and 60 MB forty times over would wait for it.
    monkeypatch.setattr(commit, "sync_file", lambda path: None)
    saver = CheckpointSaver(tmp_path, keep=Keep(unsharded=1), disk=Disk(), in_background=in_background)
    process, resident, tensors = psutil.Process(), {}, {}
    for step in range(1, saves + 1):
        snapshot = Snapshot(
            model=model,
            optimizer=optimizer,
            run_state=RunState(step=step),
            trainer_state=TrainerState(global_step=step),
        )
        saver.save(snapshot, kind="unsharded", has_optimizer=True)
        saver.wait()
        if step in (5, saves):
            tensors[step], resident[step] = live_tensors(), process.memory_info().rss
    assert resident[saves] - resident[5] < ALLOWED_BYTES
    assert tensors[saves] == tensors[5]
    assert [path.name for path in commit.list_checkpoints(tmp_path)] == [f"checkpoint-{saves}"]
