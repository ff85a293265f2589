"""What a checkpoint gives back: every tensor, under its name, of its shape and type, and nothing by accident."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from olmo_hf.errors import CheckpointError, DamagedCheckpointError
from olmo_hf.training import checkpoints, commit
from olmo_hf.training.checked_files import CheckedFiles
from olmo_hf.training.optimizers import AdamWithUpdates, Lion
from olmo_hf.training.readers import WholeReader, read_file
from olmo_hf.training.settling import checksum, describe_files
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.tensors import Table, update_rule
from tests.training.test_saving import saver, snapshot


def sign(checkpoint: Path) -> None:
    """Have the manifest agree with what the files are now."""
    manifest = commit.read_manifest(checkpoint)
    manifest.files.update(describe_files(checkpoint, list(manifest.files)))
    commit.write_manifest(checkpoint, manifest)


def restored(run: Snapshot, checkpoint: Path) -> Snapshot:
    """A fresh run that took the checkpoint up."""
    fresh = snapshot(0)
    with torch.no_grad():
        for parameter in fresh.model.parameters():
            parameter.fill_(3.0)
    fresh.optimizer.state.clear()
    fresh.extra = checkpoints.restore_tensors(checkpoint, fresh.model, fresh.optimizer)
    return fresh


def test_nothing_is_restored_by_accident(tmp_path: Path) -> None:
    run = snapshot(1)
    checkpoint = saver(tmp_path).save(run, kind="unsharded", has_optimizer=True)
    fresh = restored(run, checkpoint)
    for ours, theirs in zip(fresh.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert fresh.optimizer.state[ours].keys() == run.optimizer.state[theirs].keys()
        for key, value in run.optimizer.state[theirs].items():
            assert torch.equal(fresh.optimizer.state[ours][key], value)
    assert torch.equal(fresh.extra["norms"], run.extra["norms"])


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        pytest.param("model", "drop", "1 tensors are missing, among them model.lm_head.weight", id="missing"),
        pytest.param("model", "add", "1 tensors belong to no parameter: model.new", id="too-many"),
        pytest.param("model", "half", "shapes or types differ: model.lm_head.weight", id="type"),
        pytest.param("model", "shape", "shapes or types differ: model.lm_head.weight", id="shape"),
        pytest.param("model", "nan", r"weights that are not numbers \(model.lm_head.weight", id="nan"),
        pytest.param("optimizer", "drop", "no optimizer state for lm_head.weight", id="no-moments"),
        pytest.param("optimizer", "add", "optimizer state of unknown parameters: optimizer.new.exp_avg", id="moments"),
        pytest.param("optimizer", "half of it", "state of lm_head.weight lacks exp_avg_sq", id="one-moment-of-two"),
        pytest.param("optimizer", "shape", r"optimizer.lm_head.weight.exp_avg is \(63, 16\) there", id="moment-shape"),
        pytest.param(
            "optimizer",
            "nan",
            r"optimizer state that is no number \(optimizer.lm_head.weight.exp_avg",
            id="nan-moment",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, file: str, change: str, message: str) -> None:
    checkpoint = saver(tmp_path).save(snapshot(1), kind="unsharded", has_optimizer=True)
    path = checkpoint / f"{file}.safetensors"
    table = load_file(path)
    key = "lm_head.weight" if file == "model" else "optimizer.lm_head.weight.exp_avg"
    if change == "half of it":
        del table[f"{key}_sq"]
    elif change == "drop":
        table = {name: tensor for name, tensor in table.items() if "lm_head.weight" not in name}
    elif change == "add":
        table["new" if file == "model" else "optimizer.new.exp_avg"] = torch.zeros(2)
    elif change == "half":
        table[key] = table[key].half()
    elif change == "shape":
        table[key] = table[key][:-1].clone()
    else:
        table[key][0, 0] = float("nan")
    save_file(table, path, metadata={"format": "pt"})
    sign(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        restored(snapshot(1), checkpoint)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        pytest.param("model.safetensors", r"weights that are not numbers \(model.lm_head.weight", id="model"),
        pytest.param("optimizer.safetensors", r"optimizer state that is no number \(optimizer.lm_head", id="moment"),
    ],
)
def test_a_tensor_that_was_not_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, message: str
) -> None:
    """A reader that forgets one: memory was NaN before, and still is."""
    checkpoint = saver(tmp_path).save(snapshot(1), kind="unsharded", has_optimizer=True)
    fill = WholeReader.fill

    def forgetful(self: WholeReader, targets: Table, files: CheckedFiles) -> None:
        kept = {n: t for n, t in targets.items() if self.where[n].name != file or "lm_head.weight" not in n}
        fill(self, kept, files)

    monkeypatch.setattr(WholeReader, "fill", forgetful)
    with pytest.raises(CheckpointError, match=message):
        restored(snapshot(1), checkpoint)


def test_the_end_of_a_file_is_noticed(tmp_path: Path) -> None:
    checkpoint = saver(tmp_path).save(snapshot(1), kind="unsharded", has_optimizer=True)
    files, path = CheckedFiles(checkpoint), checkpoint / "model.safetensors"
    table = {name: torch.empty_like(tensor) for name, tensor in load_file(path).items()}
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends inside "):
        read_file(path, table, files)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_any_flipped_bit_is_noticed_while_reading(tmp_path: Path, file: str) -> None:
    """In the length of the header, in the header, in the first and the last tensor: the file is named each time."""
    checkpoint = saver(tmp_path).save(snapshot(1), kind="unsharded", has_optimizer=True)
    content = (checkpoint / file).read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for place in (0, 7, 8, *range(9, header_bytes, 97), header_bytes, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        (checkpoint / file).write_bytes(changed)
        with pytest.raises(DamagedCheckpointError, match=rf"{file} is damaged \(checksum differs"):
            restored(snapshot(1), checkpoint)
    (checkpoint / file).write_bytes(content)
    restored(snapshot(1), checkpoint)


def test_every_byte_of_the_tensors_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart opens every large file to read its content a single time, after its header was looked at."""
    checkpoint = saver(tmp_path).save(snapshot(1), kind="unsharded", has_optimizer=True)
    sums: list[Path] = []
    monkeypatch.setattr(commit, "checksum", lambda path: sums.append(path) or checksum(path))
    assert commit.newest_whole(tmp_path, tensors=False) == (checkpoint, [])
    assert not [path for path in sums if path.suffix == ".safetensors"]
    sums.clear()
    restored(snapshot(1), checkpoint)
    assert sums == []


def with_optimizer(run: Snapshot, rule: Any) -> Snapshot:
    """The run, after one step of another optimizer."""
    run.optimizer = rule(run.model.parameters(), lr=1e-3)
    run.optimizer.step()
    return run


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        pytest.param(torch.optim.AdamW, AdamWithUpdates, True, id="adamw-by-another-class"),
        pytest.param(AdamWithUpdates, torch.optim.AdamW, True, id="and-back"),
        pytest.param(Lion, torch.optim.AdamW, False, id="lion-adamw"),
        pytest.param(torch.optim.AdamW, Lion, False, id="adamw-lion"),
    ],
)
def test_the_state_of_another_rule_is_refused(tmp_path: Path, first: Any, second: Any, fits: bool) -> None:
    before, after = with_optimizer(snapshot(1), first), with_optimizer(snapshot(1), second)
    checkpoint = saver(tmp_path).save(before, kind="unsharded", has_optimizer=True)
    if fits:
        checkpoints.restore_tensors(checkpoint, after.model, after.optimizer)
        return
    with pytest.raises(CheckpointError, match=f"state of {first.__name__} and this launch uses {second.__name__}"):
        checkpoints.restore_tensors(checkpoint, after.model, after.optimizer)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000], ids=["cut", "a list", "no text", "deep"])
def test_a_description_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    checkpoint = saver(tmp_path).save(snapshot(1), kind="unsharded", has_optimizer=True)
    (checkpoint / "optimizer.json").write_bytes(text.encode("latin-1"))
    after = snapshot(1)
    with pytest.raises(CheckpointError, match=f"{checkpoint}/optimizer.json: not the description of an optimizer"):
        checkpoints.restore_tensors(checkpoint, after.model, after.optimizer)


def test_a_description_without_a_rule_is_taken_as_it_is(tmp_path: Path) -> None:
    checkpoint = saver(tmp_path).save(snapshot(1), kind="unsharded", has_optimizer=True)
    described = json.loads((checkpoint / "optimizer.json").read_text())
    assert described.pop("rule") == "AdamW" == update_rule(snapshot(1).optimizer)
    (checkpoint / "optimizer.json").write_text(json.dumps(described))
    restored(snapshot(1), checkpoint)
