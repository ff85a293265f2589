"""Restarts of runs on two processes: bitwise with as many again, and the same data and losses with another number."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from olmo_hf.model.conversion.convert import open_checkpoint
from olmo_hf.training import commit
from olmo_hf.training.checked_files import CheckedFiles
from olmo_hf.training.readers import ShardedReader
from olmo_hf.training.state import load_run_state
from tests import runs
from tests.forks import Forks
from tests.invariants.test_restart import final, read, run_twice
from tests.invariants.test_split import FSDP
from tests.served import Ranks


def shards(run_dir: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of the distributed checkpoint at the end."""
    reader = ShardedReader(run_dir / "latest" / "sharded")
    table = {name: torch.full(shape, float("nan"), dtype=dtype) for name, (shape, dtype) in reader.layout().items()}
    files = CheckedFiles(run_dir / "latest")
    reader.fill(table, files)
    files.check_the_rest()
    return table


def test_copies_of_the_model_stopped_twice(ddp: Ranks, tmp_path: Path) -> None:
    whole, parts = run_twice(ddp, tmp_path, ("--data.num_workers=1",))
    runs.same_run(parts, whole)
    assert final(parts) == final(whole)
    assert read(parts, 2) == read(whole, 2)
    assert not set(read(whole, 2)[0][1]) & set(read(whole, 2)[1][1]), "the ranks read different instances"


@pytest.mark.parametrize(
    "training",
    [
        pytest.param({"max_grad_norm_ratio": 1.0}, id="adamw"),
        pytest.param({"optimizer": "muon", "checkpoint_async": True}, id="muon-in-the-background"),
    ],
)
def test_a_shared_model_stopped_twice(fsdp: Ranks, tmp_path: Path, training: dict[str, Any]) -> None:
    whole, parts = run_twice(fsdp, tmp_path, **training)
    runs.same_run(parts, whole)
    ours, theirs = shards(parts), shards(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(list((parts / "latest" / "sharded").glob("*.distcp"))) == 2
    assert read(parts, 2) == read(whole, 2)
    for step in (6, 12):
        found = open_checkpoint(parts / f"checkpoint-{step}")
        assert set(found.weights) == set(load_file(parts / "latest" / "model.safetensors"))
        assert found.optimizer, "conversions find the moments in the shards"
    kinds = {path.name: commit.read_manifest(path).kind for path in commit.list_checkpoints(parts)}
    assert kinds == {
        "checkpoint-12": "unsharded",
        "checkpoint-8": "unsharded",
        "checkpoint-6": "sharded",
        "checkpoint-5": "unsharded",
    }


@pytest.mark.parametrize(
    "path",
    [pytest.param(("one", "ddp", "one"), id="1-2-1"), pytest.param(("ddp", "fsdp", "one"), id="ddp-fsdp-1")],
)
def test_another_number_of_processes(request: pytest.FixtureRequest, tmp_path: Path, path: tuple[str, ...]) -> None:
    """Without dropout losses agree to 1e-5: only the order of sums differs."""
    whole, parts = (runs.write_run(tmp_path / name, dropout=0.0) for name in ("whole", "parts"))
    request.getfixturevalue("one").run(whole)
    text = ""
    for ranks, stop in zip(path, (5, 8, None), strict=True):
        words = [f"--training.stop_at={stop}"] if stop is not None else []
        text = request.getfixturevalue(ranks).run(parts, *words)
    expected, found = runs.losses(tmp_path / "whole" / "run"), runs.losses(tmp_path / "parts" / "run")
    assert list(found) == list(expected)
    for step in expected:
        assert found[step][0] == pytest.approx(expected[step][0], rel=1e-5)
        assert found[step][2] == expected[step][2]
    in_one = {step: set(ids) for step, ids in read(tmp_path / "whole" / "run")[0].items()}
    there = read(tmp_path / "parts" / "run", 2)
    for step in in_one:
        own = set(there[0][step]) | set(there[1].get(step, []))
        assert own == in_one[step], f"step {step}"
    assert "random states start anew" in text
    assert "written by 1 processes and this run has 2" in text or "written by 2 processes and this run has 1" in text


def test_moments_and_settings_of_every_group_come_back(fsdp: Ranks, ddp: Ranks, tmp_path: Path) -> None:
    """All groups, not only the first; the moments of another number of processes are the same numbers."""
    # gradients are summed in the order of DDP: AdamW magnifies roundings of moments near 0
    config = runs.write_run(tmp_path, dropout=0.0, save_interval_ephemeral=None, defer_gradient_reduction=True)
    fsdp.run(config, "--training.stop_at=5")
    ddp.run(config, "--training.stop_at=6")
    five, six = (json.loads((tmp_path / "run" / f"checkpoint-{n}" / "optimizer.json").read_text()) for n in (5, 6))
    assert len(five["groups"]) == 2
    for before, after in zip(five["groups"], six["groups"], strict=True):
        for key in ("betas", "eps", "weight_decay", "initial_lr"):
            assert before[key] == after[key]
    state = load_file(tmp_path / "run" / "checkpoint-6" / "optimizer.safetensors")
    assert {float(value) for name, value in state.items() if name.endswith(".step")} == {6.0}
    reference = runs.write_run(tmp_path / "reference", dropout=0.0)
    ddp.run(reference, "--training.stop_at=6")
    expected = load_file(tmp_path / "reference" / "run" / "checkpoint-6" / "optimizer.safetensors")
    assert state.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(state[name], expected[name], rtol=1e-4, atol=1e-7)


def test_every_unsharded_checkpoint_of_shards_is_a_plain_model(fsdp: Ranks, tmp_path: Path) -> None:
    config = runs.write_run(
        tmp_path, max_duration=4, save_interval_unsharded=3, unsharded_optimizer=False, save_interval_ephemeral=None
    )
    fsdp.run(config, "--training.torch_compile=true", "--training.torch_compile_backend=eager")
    models = {}
    for step in (3, 4):
        checkpoint = tmp_path / "run" / f"checkpoint-{step}"
        model, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
        assert not any(info.values()), info
        models[step] = model
        stored = load_file(checkpoint / "model.safetensors")
        assert set(stored) == set(model.state_dict()), "names as in a plain model, without wrappers"
        size = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        assert size <= (checkpoint / "model.safetensors").stat().st_size <= size + 8192
    assert not (tmp_path / "run" / "checkpoint-3" / "sharded").exists(), "no optimizer was asked for"
    difference = models[3].lm_head.weight - models[4].lm_head.weight
    assert difference.abs().max() > 0


@pytest.fixture(params=[{}, FSDP], ids=["ddp", "fsdp2"])
def machines(request: pytest.FixtureRequest, forks: Forks, tmp_path: Path) -> Iterator[Ranks]:
    """Two machines with a disk each: processes that see other directories under the same name."""
    directories = [tmp_path / "machine0", tmp_path / "machine1"]
    for directory in directories:
        directory.mkdir()
    ranks = Ranks(2, forks, directories=directories, **request.param)
    yield ranks
    ranks.close()


@pytest.mark.slow
def test_machines_with_disks_of_their_own(machines: Ranks, tmp_path: Path) -> None:
    undisturbed = runs.write_run(tmp_path / "undisturbed", output_dir="undisturbed")
    machines.run(undisturbed)
    stores = {"upload_to": f"file://{tmp_path}/store"}
    config = runs.write_run(tmp_path / "config", output_dir="run", **stores)
    machines.run(config, "--training.stop_at=5")
    for rank in (0, 1):
        here = tmp_path / f"machine{rank}" / "run"
        manifest = commit.verify(here / "checkpoint-5")
        assert f"rng_state_{rank}.json" in manifest.files
        assert f"rng_state_{1 - rank}.json" not in manifest.files
        assert load_run_state(here / "latest").step == 5
    # the newest of one machine is damaged, so both go on from the one before
    (tmp_path / "machine1" / "run" / "checkpoint-5" / "rng_state_1.json").write_text("{}")
    text = machines.run(config, "--training.stop_at=8")
    assert "passed over" in text
    # a machine is replaced by an empty one
    for path in sorted((tmp_path / "machine1" / "run").rglob("*"), reverse=True):
        path.unlink() if path.is_file() or path.is_symlink() else path.rmdir()
    machines.run(config)
    runs.same_run(tmp_path / "machine0" / "run", tmp_path / "machine0" / "undisturbed")
    for rank in (0, 1):
        commit.verify(tmp_path / f"machine{rank}" / "run" / "checkpoint-12")
