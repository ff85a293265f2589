"""Faults put into real runs: what is damaged is named and passed over, and the run still ends where it should."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from olmo_hf.training import commit
from olmo_hf.training.state import load_run_state
from tests import runs
from tests.crash.conftest import MODES, Undisturbed
from tests.forks import Forks
from tests.training.test_commit import flip


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def nothing(checkpoint: Path) -> None:
    """The newest is whole."""


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated-file": (truncate, "model.safetensors has"),
    "flipped-bit-in-the-weights": (flip("model.safetensors", 60_000), "model.safetensors is damaged"),
    "flipped-bit-in-the-moments": (flip("optimizer.safetensors", 60_000), "optimizer.safetensors is damaged"),
    "flipped-bit-in-a-length": (flip("model.safetensors", 3), "model.safetensors is damaged"),
    "flipped-bit-in-a-header": (flip("optimizer.safetensors", 8), "optimizer.safetensors is damaged"),
    "flipped-bit-in-the-manifest": (flip(commit.MANIFEST, 100), "manifest.json is"),
    "no-random-state": (lambda path: (path / "rng_state_0.json").unlink(), "rng_state_0.json is missing"),
    "empty-state": (lambda path: (path / "run_state.json").write_bytes(b""), "run_state.json has 0 bytes"),
}


@pytest.fixture(scope="module")
def stopped(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped at step 8, with whole checkpoints 6 and 8."""
    directory = tmp_path_factory.mktemp("stopped")
    forks.run(
        runs.write_run(directory, output_dir="run"), "--training.stop_at=8", f"--training.output_dir={directory}/run"
    )
    return directory


@pytest.fixture(scope="module")
def sharded(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks with shares of the model, killed after it wrote step 8; all its checkpoints are in shards."""
    directory = tmp_path_factory.mktemp("sharded")
    config = runs.write_run(directory, output_dir="run")
    words = (f"--training.output_dir={directory}/run", "--training.save_interval=2")
    launch = forks.start(config, *words, ranks=2, **MODES["fsdp2"].env)
    launch.until(lambda: (directory / "run" / "checkpoint-8").is_dir())
    launch.signal(signal.SIGSTOP)
    launch.kill()
    for step in (10, 12):
        shutil.rmtree(directory / "run" / f"checkpoint-{step}", ignore_errors=True)
    return directory


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_passed_over(
    undisturbed: Undisturbed, forks: Forks, stopped: Path, tmp_path: Path, name: str
) -> None:
    damage, reason = DAMAGES[name]
    shutil.copytree(stopped, tmp_path, symlinks=True, dirs_exist_ok=True)
    damage(tmp_path / "run" / "checkpoint-8")
    text = forks.run(tmp_path / "run.yaml", f"--training.output_dir={tmp_path}/run")
    assert f"passed over: {tmp_path}/run/checkpoint-8: {reason}" in text
    assert f"from {tmp_path}/run/checkpoint-6 (step 6)" in text
    while_reading = name.startswith("flipped-bit") and name != "flipped-bit-in-the-manifest"
    assert ("starting once more" in text) == while_reading
    runs.same_run(tmp_path / "run", undisturbed["one"])


def test_a_stale_link_and_times_set_back_change_nothing(
    undisturbed: Undisturbed, forks: Forks, stopped: Path, tmp_path: Path
) -> None:
    """The step decides: not the link, not the time of the files, which a clock set back would turn round."""
    shutil.copytree(stopped, tmp_path, symlinks=True, dirs_exist_ok=True)
    run_dir = tmp_path / "run"
    (run_dir / "latest").unlink()
    (run_dir / "latest").symlink_to("checkpoint-6")
    for step, seconds in ((6, 4_000_000_000), (8, 1_000)):
        for path in [run_dir / f"checkpoint-{step}", *(run_dir / f"checkpoint-{step}").iterdir()]:
            os.utime(path, (seconds, seconds))
    words = (f"--training.output_dir={run_dir}", "--training.keep_unsharded=1")
    assert f"from {run_dir}/checkpoint-8 (step 8)" in forks.run(tmp_path / "run.yaml", *words)
    runs.same_run(run_dir, undisturbed["one"])
    assert [path.name for path in commit.list_checkpoints(run_dir)] == ["checkpoint-12"]
    assert (run_dir / "latest").resolve().name == "checkpoint-12"


def test_a_clock_set_back_changes_nothing(
    undisturbed: Undisturbed, forks: Forks, stopped: Path, tmp_path: Path
) -> None:
    """The machine's clock is set back by twenty years before the second launch, and goes back further during it."""
    shutil.copytree(stopped, tmp_path, symlinks=True, dirs_exist_ok=True)
    run_dir, words = tmp_path / "run", (f"--training.output_dir={tmp_path}/run", "--training.keep_unsharded=2")
    launch = forks.start(tmp_path / "run.yaml", *words, prepare="tests.crash.clock_set_back")
    assert launch.wait() == [0]
    runs.same_run(run_dir, undisturbed["one"])
    assert [path.name for path in commit.list_checkpoints(run_dir)] == ["checkpoint-12", "checkpoint-8"]
    older, newer = (commit.verify(run_dir / f"checkpoint-{step}").created for step in (8, 12))
    assert newer < older, "the clock was set back"
    assert (run_dir / "latest").resolve().name == "checkpoint-12"
    before = {path: path.read_bytes() for path in run_dir.glob("checkpoint-*/*")}
    forks.run(tmp_path / "run.yaml", *words)
    assert {path: path.read_bytes() for path in run_dir.glob("checkpoint-*/*")} == before


@pytest.mark.parametrize(
    "lost", ["sharded/__1_0.distcp", "sharded/.metadata", "rng_state_1.json"], ids=["tensors", "index", "random-state"]
)
def test_a_missing_file_of_one_rank_is_named(
    forks: Forks, undisturbed: Undisturbed, sharded: Path, tmp_path: Path, lost: str
) -> None:
    shutil.copytree(sharded, tmp_path, symlinks=True, dirs_exist_ok=True)
    run_dir = tmp_path / "run"
    (run_dir / "checkpoint-8" / lost).unlink()
    words = (f"--training.output_dir={run_dir}", "--training.save_interval=6")
    text = forks.run(tmp_path / "run.yaml", *words, ranks=2, **MODES["fsdp2"].env)
    assert f"checkpoint-8: {lost} is missing" in text
    assert f"from {run_dir}/checkpoint-6 (step 6)" in text
    runs.same_run(run_dir, undisturbed["fsdp2"])


@pytest.mark.parametrize("ranks", [2, 1])
def test_damage_in_the_file_of_one_rank_ends_no_run(
    forks: Forks, undisturbed: Undisturbed, sharded: Path, tmp_path: Path, ranks: int
) -> None:
    """It shows while that rank reads its file; all of them start again, also where it is another number of ranks."""
    shutil.copytree(sharded, tmp_path, symlinks=True, dirs_exist_ok=True)
    run_dir = tmp_path / "run"
    flip("sharded/__1_0.distcp", 60_000)(run_dir / "checkpoint-8")
    words = (f"--training.output_dir={run_dir}", "--training.save_interval=6")
    env = {"prepare": "tests.crash.count_models", **(MODES["fsdp2"].env if ranks == 2 else {})}
    text = forks.run(tmp_path / "run.yaml", *words, ranks=ranks, **env)
    assert "starting once more, from a checkpoint that is whole" in text
    assert f"passed over: {run_dir}/checkpoint-8: sharded/__1_0.distcp is damaged" in text
    assert text.count("models built before: 1, alive: 0") == ranks, "nothing of the first start takes memory"
    assert f"from {run_dir}/checkpoint-6 (step 6)" in text
    if ranks == 2:
        runs.same_run(run_dir, undisturbed["fsdp2"])
    assert commit.newest_whole(run_dir)[0] == run_dir / "checkpoint-12"


def test_the_first_checkpoint_is_read_back_before_the_first_step(forks: Forks, tmp_path: Path) -> None:
    config, run_dir = runs.write_run(tmp_path), tmp_path / "run"
    launch = forks.start(config, prepare="tests.crash.spoil_first_save", RUN_DIR=str(run_dir))
    assert launch.wait() == [2]
    text = (tmp_path / "log.txt").read_text()
    assert "model.safetensors is damaged" in text
    assert "Traceback" not in text
    assert runs.logged_steps(run_dir) == []


def test_nothing_whole_is_no_reason_to_start_afresh(forks: Forks, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path, symlinks=True, dirs_exist_ok=True)
    for step in (6, 8):
        truncate(tmp_path / "run" / f"checkpoint-{step}")
    launch = forks.start(tmp_path / "run.yaml", f"--training.output_dir={tmp_path}/run")
    assert launch.wait() == [2]
    text = (tmp_path / "log.txt").read_text()
    assert "none of its checkpoints is whole" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("mode", ["one", "ddp"])
def test_the_second_of_two_launches_is_refused(
    undisturbed: Undisturbed, forks: Forks, tmp_path: Path, mode: str
) -> None:
    way = MODES[mode]
    config, run_dir = runs.write_run(tmp_path), tmp_path / "run"
    first = forks.start(config, ranks=way.ranks, **way.env)
    first.until(lambda: 2 in runs.logged_steps(run_dir))
    first.signal(signal.SIGSTOP)
    (tmp_path / "second").mkdir()
    second = shutil.copy(config, tmp_path / "second" / "run.yaml")
    assert forks.start(Path(second), ranks=way.ranks, **way.env).wait() == [2] * way.ranks
    text = (tmp_path / "second" / "log.txt").read_text()
    assert "is training here already" in text
    assert str(first.pids[0]) in text
    assert "Traceback" not in text
    first.signal(signal.SIGCONT)
    assert not any(first.wait())
    runs.same_run(run_dir, undisturbed[mode])


@pytest.mark.parametrize("mode", ["fsdp2", "fsdp2-async"])
def test_a_signal_to_one_rank_stops_both_with_a_checkpoint(
    undisturbed: Undisturbed, forks: Forks, tmp_path: Path, mode: str
) -> None:
    way = MODES[mode]
    config, run_dir = runs.write_run(tmp_path, **way.training), tmp_path / "run"
    launch = forks.start(config, ranks=2, **way.env)
    launch.until(lambda: 3 in runs.logged_steps(run_dir))
    launch.signal(signal.SIGTERM, ranks=[1])
    codes = launch.wait()
    assert codes == [128 + signal.SIGTERM, 0]
    state = load_run_state(run_dir / "latest")
    assert state.step == max(runs.logged_steps(run_dir))
    assert commit.verify(run_dir / "latest").kind == "unsharded"
    forks.run(config, ranks=2, **way.env)
    runs.same_run(run_dir, undisturbed[mode])


@pytest.mark.parametrize("mode", ["one", "ddp"])
def test_ten_seconds_of_standstill(undisturbed: Undisturbed, forks: Forks, tmp_path: Path, mode: str) -> None:
    """One rank is stopped for ten seconds, as a machine that swaps or a disk that hangs would; the other waits."""
    way = MODES[mode]
    config, run_dir = runs.write_run(tmp_path), tmp_path / "run"
    launch = forks.start(config, ranks=way.ranks, **way.env)
    launch.until(lambda: 3 in runs.logged_steps(run_dir))
    launch.signal(signal.SIGSTOP, ranks=[way.ranks - 1])
    time.sleep(10)
    assert launch.running()
    launch.signal(signal.SIGCONT)
    assert not any(launch.wait())
    runs.same_run(run_dir, undisturbed[mode])


def test_a_failure_in_the_background_ends_the_run_and_costs_nothing(
    undisturbed: Undisturbed, forks: Forks, tmp_path: Path
) -> None:
    config, run_dir = runs.write_run(tmp_path, checkpoint_async=True), tmp_path / "run"
    forks.run(config, "--training.stop_at=4")
    launch = forks.start(config, prepare="tests.crash.obstruct_save", RUN_DIR=str(run_dir))
    assert launch.wait() == [2]
    text = (tmp_path / "log.txt").read_text()
    assert "cannot write" in text
    assert "Older checkpoints are untouched" in text
    assert "Traceback" not in text
    commit.verify(run_dir / "checkpoint-4")
    forks.run(config)
    runs.same_run(run_dir, undisturbed["one"])


def test_an_empty_machine_goes_on_from_the_copies(undisturbed: Undisturbed, forks: Forks, tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store"
    config, run_dir = runs.write_run(tmp_path, upload_to=store), tmp_path / "run"
    launch = forks.start(config)
    launch.until(lambda: (tmp_path / "store" / "checkpoint-6" / commit.MANIFEST).is_file())
    launch.kill()
    kept = (run_dir / "metrics.jsonl").read_bytes()
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    text = forks.run(config)
    assert f"fetching checkpoint-6 from {store}" in text or f"fetching checkpoint-8 from {store}" in text
    (run_dir / "metrics.jsonl").write_bytes(kept + (run_dir / "metrics.jsonl").read_bytes())
    runs.same_run(run_dir, undisturbed["one"])
    names = {path.parent.name for path in (tmp_path / "store").glob(f"*/{commit.MANIFEST}")}
    assert names == {"checkpoint-6", "checkpoint-12"}, "no ephemeral copy is left"
