"""Checkpoints in the background: what is written is what was, one at a time, and failures are loud."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerState

from olmo_hf.errors import CheckpointError
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training import checkpoints, commit, settling
from olmo_hf.training.disk import Disk
from olmo_hf.training.rotation import Keep
from olmo_hf.training.saving import CheckpointSaver
from olmo_hf.training.snapshot import Copies, Snapshot, plain, take
from olmo_hf.training.state import RunState


def snapshot(step: int, *, tied: bool = False) -> Snapshot:
    """A tiny model and its optimizer after one step."""
    torch.manual_seed(0)
    config = OlmoHfConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    model = OlmoHfForCausalLM(config)
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    return Snapshot(
        model=model,
        optimizer=optimizer,
        run_state=RunState(step=step, tokens=8 * step),
        trainer_state=TrainerState(global_step=step),
        extra={"norms": torch.tensor([1.0, 2.0])},
    )


def saver(run_dir: Path, **options: Any) -> CheckpointSaver:
    return CheckpointSaver(run_dir, keep=Keep(), disk=Disk(), **options)


class Gate:
    """Holds a save in the background until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open = threading.Event()
        monkeypatch.setattr(checkpoints, "reached", lambda stage, step: stage == "open" and self.open.wait(60))


def test_in_the_background_the_same_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What training does to the tensors while they are being written does not reach the disk."""
    run = snapshot(3)
    saver(tmp_path / "now").save(run, kind="unsharded", has_optimizer=True)
    gate, background = Gate(monkeypatch), saver(tmp_path / "later", in_background=True)
    final = background.save(run, kind="unsharded", has_optimizer=True)
    with torch.no_grad():
        for tensor in [*run.model.parameters(), *run.extra.values()]:
            tensor.fill_(7.0)
        for state in run.optimizer.state.values():
            for value in state.values():
                value.fill_(7.0)
    run.trainer_state.global_step = run.run_state.step = 99
    assert not final.exists()
    assert not run.model.config.use_cache, "training's own setting is left alone"
    gate.open.set()
    background.finish()
    commit.verify(final)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(final / name), load_file(tmp_path / "now" / "checkpoint-3" / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for name in ("config.json", "run_state.json", "trainer_state.json"):
        assert (final / name).read_text() == (tmp_path / "now" / "checkpoint-3" / name).read_text()
    assert json.loads((final / "config.json").read_text()).get("use_cache", True)


def test_there_are_never_two_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, background = Gate(monkeypatch), saver(tmp_path, in_background=True)
    first = background.save(snapshot(1), kind="unsharded", has_optimizer=True)
    opener = threading.Timer(0.5, gate.open.set)
    opener.start()
    background.save(snapshot(2), kind="unsharded", has_optimizer=True)
    assert first.is_dir(), "the second waited for the first"
    background.finish()
    assert [path.name for path in commit.list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-1"]


@pytest.mark.parametrize("in_background", [False, True])
def test_training_does_not_wait_until_old_ones_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    """They are put aside at once; the next save waits, so that the space is there."""
    saving = CheckpointSaver(tmp_path, keep=Keep(unsharded=1), disk=Disk(), in_background=in_background)
    saving.save(snapshot(1), kind="unsharded", has_optimizer=True)
    gate, delete = threading.Event(), commit.delete
    monkeypatch.setattr(commit, "delete", lambda trash: gate.wait(60) and delete(trash))
    newest = saving.save(snapshot(2), kind="unsharded", has_optimizer=True)
    if saving._thread is not None:
        saving._thread.join()
    assert commit.list_checkpoints(tmp_path) == [newest]
    assert (tmp_path / ".trash-checkpoint-1").is_dir(), "it has not been deleted, and nobody waits for it"
    threading.Timer(0.3, gate.set).start()
    saving.save(snapshot(3), kind="unsharded", has_optimizer=True)
    assert gate.is_set()
    saving.finish()
    assert not list(tmp_path.glob(".trash*"))
    assert [path.name for path in commit.list_checkpoints(tmp_path)] == ["checkpoint-3"]


def test_a_failure_stops_the_run_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    background = saver(tmp_path, in_background=True)
    background.save(snapshot(1), kind="unsharded", has_optimizer=True)
    background.wait()
    before = commit.verify(tmp_path / "checkpoint-1")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(settling, "sync_file", full)
    background.save(snapshot(2), kind="unsharded", has_optimizer=True)
    assert background._thread is not None
    background._thread.join()
    with pytest.raises(CheckpointError, match=r"checkpoint-2: .*No space left on device.*Older checkpoints are"):
        background.poll()
    background.poll()
    assert commit.verify(tmp_path / "checkpoint-1") == before
    assert not list(tmp_path.glob(".staging*"))


def test_the_memory_of_copies_is_told_and_reused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="olmo_hf")
    run, background = snapshot(1), saver(tmp_path, in_background=True)
    background.save(run, kind="unsharded", has_optimizer=True)
    background.wait()
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    steps, extra = len(list(run.model.parameters())), 2
    expected_bytes = 4 * (3 * parameters + steps + extra)
    assert f"hold a copy of {expected_bytes:,} bytes" in caplog.text
    assert background._copies is not None
    held = {key: tensor.data_ptr() for key, tensor in background._copies._held.items()}
    run.run_state.step = 2
    background.save(run, kind="unsharded", has_optimizer=True)
    background.finish()
    assert {key: tensor.data_ptr() for key, tensor in background._copies._held.items()} == held
    assert caplog.text.count("hold a copy") == 1


@pytest.mark.parametrize("copies", [None, Copies()], ids=["as-it-stands", "copied"])
def test_a_tied_head_is_stored_once(tmp_path: Path, copies: Copies | None) -> None:
    run = snapshot(1, tied=True)
    contents = take(run, kind="unsharded", has_optimizer=True, is_writer=True, copies=copies)
    final = tmp_path / "checkpoint-1"
    checkpoints.write_checkpoint(tmp_path, contents, disk=Disk())
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    size = (final / "model.safetensors").stat().st_size
    assert 4 * parameters <= size <= 4 * parameters + 4096
    assert (final / "optimizer.safetensors").stat().st_size <= 2.05 * size + 8192
    assert OlmoHfForCausalLM.from_pretrained(final).lm_head.weight.shape == (64, 16)


def test_whatever_was_logged_the_state_is_strict_json() -> None:
    value = {
        "a": torch.tensor(1.5),
        "b": np.float32(2.5),
        "c": float("nan"),
        "d": [float("inf"), np.int64(3)],
        "e": "x",
    }
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == {
        "a": 1.5,
        "b": 2.5,
        "c": None,
        "d": [None, 3],
        "e": "x",
    }
