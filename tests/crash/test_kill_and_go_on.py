"""`kill -9`, the same command again: bitwise the losses and the weights of a run that was never killed."""

from pathlib import Path

import pytest

from tests import runs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    runs.run(runs.write_run(directory))
    return directory / "run"


def test_an_undisturbed_run_logs_every_step(undisturbed: Path) -> None:
    assert sorted(runs.losses(undisturbed)) == list(range(1, runs.STEPS + 1))
    assert sorted(p.name for p in undisturbed.glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-6"]


@pytest.mark.parametrize("step", [3, 9])
def test_killed_between_saves(undisturbed: Path, tmp_path: Path, step: int) -> None:
    config = runs.write_run(tmp_path)
    process = runs.start(config)
    runs.kill_when(process, lambda: step in runs.logged_steps(tmp_path / "run"))
    text = runs.run(config)
    assert "starts" in text
    runs.same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("stage", ["model", "manifest"])
def test_killed_in_the_middle_of_a_save(undisturbed: Path, tmp_path: Path, stage: str) -> None:
    config = runs.write_run(tmp_path)
    script = Path(__file__).parent / "killed_in_save.py"
    process = runs.start(config, script=script, KILL_AT_STEP="6", KILL_AT_STAGE=stage)
    assert process.wait(timeout=240) == -9
    assert (tmp_path / "run" / ".staging-checkpoint-6").is_dir(), "it died inside the save"
    assert (tmp_path / "run" / "latest").resolve().name == "checkpoint-4"
    runs.run(config)
    assert not list((tmp_path / "run").glob(".staging*"))
    runs.same_run(tmp_path / "run", undisturbed)


def test_a_finished_run_stays_as_it_is(undisturbed: Path, tmp_path: Path) -> None:
    config = runs.write_run(tmp_path)
    runs.run(config)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("checkpoint-*/*")}
    runs.run(config)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("checkpoint-*/*")} == before
    assert runs.logged_steps(tmp_path / "run") == list(range(1, runs.STEPS + 1))
