"""`kill -9`, the same command again: bitwise the losses and the weights of a run that was never killed."""

from pathlib import Path

import psutil
import pytest

from olmo_hf.training import commit
from tests import runs
from tests.crash.conftest import MODES, Undisturbed
from tests.forks import Forks


def test_an_undisturbed_run_logs_every_step(undisturbed: Undisturbed) -> None:
    run_dir = undisturbed["one"]
    assert sorted(runs.losses(run_dir)) == list(range(1, runs.STEPS + 1))
    assert sorted(p.name for p in run_dir.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-6"]


def test_killed_between_saves_from_the_command_line(undisturbed: Undisturbed, tmp_path: Path) -> None:
    config = runs.write_run(tmp_path)
    process = runs.start(config)
    runs.kill_when(process, lambda: 3 in runs.logged_steps(tmp_path / "run"))
    text = runs.run(config)
    assert "starts" in text
    runs.same_run(tmp_path / "run", undisturbed["one"])


@pytest.mark.takes(22, "torchrun twice, with two interpreters each: launcher and ranks are real, and die together")
def test_killed_under_torchrun(undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The launcher and its ranks are killed together; the same command goes on."""
    config, run_dir = runs.write_run(tmp_path), tmp_path / "run"
    process = runs.start(config, processes=2)
    family: list[psutil.Process] = []

    def third_step() -> bool:
        family[:] = runs.family(process)
        return 3 in runs.logged_steps(run_dir)

    runs.kill_when(process, third_step)
    assert len(family) >= 3, "the launcher and two ranks"
    assert not [member for member in family if member.is_running()]
    runs.run(config, processes=2)
    runs.same_run(run_dir, undisturbed["ddp"])


@pytest.mark.parametrize(
    ("mode", "moment"),
    [
        pytest.param("one", "6 model 0", id="one-model"),
        pytest.param("one", "6 manifest 0", id="one-manifest"),
        pytest.param("one", "6 done 0", id="one-done"),
        pytest.param("async", "6 optimizer 0", id="async-optimizer"),
        pytest.param("ddp", "6 model 1", id="ddp-rank-1"),
        pytest.param("fsdp2", "6 state 1", id="fsdp2-rank-1"),
        pytest.param("fsdp2-async", "6 manifest 0", id="fsdp2-async-manifest"),
    ],
)
def test_killed_inside_a_save(undisturbed: Undisturbed, forks: Forks, tmp_path: Path, mode: str, moment: str) -> None:
    way = MODES[mode]
    config, run_dir = runs.write_run(tmp_path, **way.training), tmp_path / "run"
    launch = forks.start(config, ranks=way.ranks, prepare="tests.crash.die_in_save", DIE_AT=moment, **way.env)
    codes = launch.wait()
    assert -9 in codes, "it died inside the save"
    if "done" not in moment:
        assert (run_dir / ".staging-checkpoint-6").is_dir()
        assert not (run_dir / "checkpoint-6").exists()
        assert commit.newest_whole(run_dir)[0] == run_dir / "checkpoint-4"
    forks.run(config, ranks=way.ranks, **way.env)
    assert not list(run_dir.glob(".staging*"))
    runs.same_run(run_dir, undisturbed[mode])


@pytest.mark.parametrize(
    ("words", "again", "last"),
    [
        pytest.param((), (), runs.STEPS, id="the whole run"),
        pytest.param(("--training.stop_at=5",), ("--training.stop_at=5",), 5, id="stopped, and the same command"),
        pytest.param(("--training.stop_at=5",), ("--training.stop_at=3",), 5, id="a stop that lies behind"),
    ],
)
def test_a_finished_run_stays_as_it_is(
    forks: Forks, tmp_path: Path, words: tuple[str, ...], again: tuple[str, ...], last: int
) -> None:
    config = runs.write_run(tmp_path)
    forks.run(config, *words)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("checkpoint-*/*")}
    forks.run(config, *again)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("checkpoint-*/*")} == before
    assert runs.logged_steps(tmp_path / "run") == list(range(1, last + 1))
