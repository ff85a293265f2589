"""Stopped and started again, a run is the run that was never stopped, to the last bit of losses, weights and moments.

Every run here is stopped twice: at step 5, where an epoch ends, and at step 8, in a launch that was itself a restart.
Dropout is on, so that random states count. Equality is exact; nothing is rounded.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.training import commit
from olmo_hf.training.state import load_run_state
from tests import runs
from tests.served import Ranks

STOPS = ("--training.stop_at=5", "--training.stop_at=8")


def final(run_dir: Path) -> dict[str, bytes]:
    """Weights and optimizer state at the end, as bytes."""
    files = sorted((run_dir / "latest").glob("*.safetensors"))
    return {f"{file.name}/{k}": t.numpy().tobytes() for file in files for k, t in load_file(file).items()}


def read(run_dir: Path, ranks: int = 1) -> list[dict[int, list[int]]]:
    """Instances by step, of every rank."""
    return [read_data_indices(data_indices_path(run_dir, rank)) for rank in range(ranks)]


def run_twice(ranks: Ranks, directory: Path, words: tuple[str, ...] = (), **training: Any) -> tuple[Path, Path]:
    """An undisturbed run and one with two stops."""
    whole, parts = (runs.write_run(directory / name, **training) for name in ("whole", "parts"))
    ranks.run(whole, *words)
    for stop in (*STOPS, ""):
        ranks.run(parts, *words, *([stop] if stop else []))
    return directory / "whole" / "run", directory / "parts" / "run"


CASES: list[Any] = [
    pytest.param((), {}, id="adamw"),
    pytest.param((), {"optimizer": "lion", "per_device_train_batch_size": 8}, id="lion-no-accumulation"),
    pytest.param(("--data.num_workers=1",), {"optimizer": "muon"}, id="muon-one-worker"),
    pytest.param(("--data.num_workers=2",), {"optim": "adafactor"}, id="adafactor-two-workers"),
    pytest.param(("--data.order=permutation",), {"max_grad_norm_ratio": 1.0}, id="adaptive-clipping-permutation"),
    pytest.param((), {"checkpoint_async": True, "selective_updates": True}, id="in-the-background"),
]
MORE: list[Any] = [
    pytest.param((), {"optim": "sgd", "optim_args": None}, id="sgd"),
    pytest.param(("--data.num_workers=2",), {"optim": "adamw_torch"}, id="torch-adamw"),
    pytest.param(("--data.order=random_offsets",), {"optimizer": "lion"}, id="random-offsets"),
    pytest.param((), {"clip_groups": "parameter", "max_grad_norm_ratio": 2.0}, id="clipping-by-parameter"),
    pytest.param((), {"scheduler": {"name": "warmup_stable_decay", "decay": 4, "warmup": 3}}, id="schedule-in-steps"),
]


def check(ranks: Ranks, directory: Path, words: tuple[str, ...], training: dict[str, Any]) -> None:
    whole, parts = run_twice(ranks, directory, words, **training)
    runs.same_run(parts, whole)
    assert final(parts) == final(whole)
    assert read(parts) == read(whole)
    ours, theirs = load_run_state(parts / "latest"), load_run_state(whole / "latest")
    assert ours == theirs


@pytest.mark.parametrize(("words", "training"), CASES)
def test_stopped_twice(one: Ranks, tmp_path: Path, words: tuple[str, ...], training: dict[str, Any]) -> None:
    check(one, tmp_path, words, training)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "training"), MORE)
def test_stopped_twice_in_more_settings(
    one: Ranks, tmp_path: Path, words: tuple[str, ...], training: dict[str, Any]
) -> None:
    check(one, tmp_path, words, training)


def test_a_second_warm_up_goes_on_where_it_began(one: Ranks, tmp_path: Path) -> None:
    """The optimizer is reset once; a restart in the middle of the second warm-up neither repeats nor forgets it."""
    first = runs.write_run(tmp_path / "first", max_duration=6)
    one.run(first)
    source = tmp_path / "first" / "run" / "checkpoint-6"
    stage = {"resume": str(source), "reset_optimizer": True, "bolt_on_warmup": 512}
    whole, parts = (runs.write_run(tmp_path / name, **stage) for name in ("whole", "parts"))
    one.run(whole)
    one.run(parts, "--training.stop_at=8")
    assert load_run_state(tmp_path / "parts" / "run" / "latest").bolt_on_start == {"steps": 6, "tokens": 768}
    one.run(parts, "--training.stop_at=9")
    one.run(parts)
    runs.same_run(tmp_path / "parts" / "run", tmp_path / "whole" / "run", range(7, runs.STEPS + 1))
    rates = [runs.losses(tmp_path / "parts" / "run")[step][2] for step in range(7, 13)]
    assert rates[0] < rates[1] < rates[2] < rates[3], "four steps of 128 tokens are the warm-up"
    assert rates[4] < rates[3]


def test_the_optimizer_matters(one: Ranks, tmp_path: Path) -> None:
    """Without its state the next step is another one: what the tests above call equal is not equal anyway."""
    run = runs.write_run(tmp_path, max_duration=6)
    one.run(run, "--training.stop_at=5")
    source = tmp_path / "source"
    shutil.copytree(tmp_path / "run" / "checkpoint-5", source)
    one.run(run)
    other = runs.write_run(tmp_path / "other", max_duration=6, resume=str(source), reset_optimizer=True)
    text = one.run(other)
    ours, theirs = runs.losses(tmp_path / "other" / "run")[6], runs.losses(tmp_path / "run")[6]
    assert ours[0] == theirs[0], "the loss comes before the update"
    assert runs.weights(tmp_path / "other" / "run") != runs.weights(tmp_path / "run")
    assert "source" in text


def test_new_settings_count_and_are_told(one: Ranks, tmp_path: Path) -> None:
    config = runs.write_run(tmp_path, save_interval_ephemeral=None, save_interval=2, scheduler={"name": "constant"})
    one.run(config, "--training.stop_at=3")
    text = one.run(
        config,
        "--training.save_interval=4",
        "--training.learning_rate=0.001",
        "--training.weight_decay=0.0",
        "--training.logging_steps=3",
        "--training.max_duration=9",
    )
    for sentence in (
        "training.save_interval was 2 and is now 4",
        "training.learning_rate was 0.01 and is now 0.001",
        "training.weight_decay was 0.1 and is now 0.0",
        "training.max_duration was 12 and is now 9",
    ):
        assert f"changed since the last launch: {sentence}" in text
    names = {path.name for path in commit.list_checkpoints(tmp_path / "run")}
    assert names == {"checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoint-8", "checkpoint-9"}
    found = runs.losses(tmp_path / "run")
    assert sorted(found) == [1, 2, 3, 6, 9]
    assert {step: rate for step, (_, _, rate) in found.items()} == {1: 0.01, 2: 0.01, 3: 0.01, 6: 0.001, 9: 0.001}


def test_the_logged_loss_is_a_mean_over_the_steps_since_the_last_line(one: Ranks, tmp_path: Path) -> None:
    whole = runs.write_run(tmp_path / "whole", max_duration=6)
    one.run(whole)
    parts = runs.write_run(tmp_path / "parts", max_duration=6, logging_steps=3)
    one.run(parts, "--training.stop_at=4")
    one.run(parts)
    each, found = runs.losses(tmp_path / "whole" / "run"), runs.losses(tmp_path / "parts" / "run")
    assert found[6][0] == pytest.approx((each[5][0] + each[6][0]) / 2, rel=1e-6)  # float32 sums


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({}, ("--model.config.hidden_size=48",), id="model"),
        pytest.param({}, ("--data.seed=7",), id="data"),
    ],
)
def test_another_model_or_other_data_are_refused(
    one: Ranks, tmp_path: Path, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    config = runs.write_run(tmp_path, **change)
    one.run(config, "--training.stop_at=2")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("checkpoint-*/*")}
    assert one.codes(config, *words) == [2]
    text = (tmp_path / "log.txt").read_text()
    name = words[0].removeprefix("--").partition("=")[0].rpartition(".")[2]
    assert "belongs to another run" in text
    assert f"{name} was" in text
    assert "Traceback" not in text
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("checkpoint-*/*")} == before


def test_data_may_be_other_when_asked_for_by_name(one: Ranks, tmp_path: Path) -> None:
    first = runs.write_run(tmp_path / "first", max_duration=4)
    one.run(first)
    source = str(tmp_path / "first" / "run" / "checkpoint-4")
    config = runs.write_run(tmp_path / "second", resume=source, restore_dataloader=False)
    one.run(config, "--data.seed=7", "--training.stop_at=6")
    one.run(config, "--data.seed=7")
    state = load_run_state(tmp_path / "second" / "run" / "latest")
    assert (state.step, state.position.epoch, state.position.instances) == (12, 1, 24), "eight steps from the start"
    seen = read(tmp_path / "second" / "run")[0]
    assert len({i for step in range(5, 10) for i in seen[step]}) == 40, "the new data once through, none twice"


def test_missing_random_states_are_told(one: Ranks, tmp_path: Path) -> None:
    config = runs.write_run(tmp_path, max_duration=4)
    one.run(config, "--training.stop_at=2")
    checkpoint = tmp_path / "run" / "checkpoint-2"
    (checkpoint / "rng_state_0.json").unlink()
    manifest = commit.read_manifest(checkpoint)
    del manifest.files["rng_state_0.json"]
    commit.write_manifest(checkpoint, manifest)
    text = one.run(config)
    assert "random states start anew" in text
    assert "rng_state_0.json" in text
