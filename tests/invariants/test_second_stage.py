"""What a run does once when it starts from another run's checkpoint, and that a restart does not do it again.

Forty-two instances make five steps of eight an epoch; step 6 of a plain run is the first of the second epoch.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from olmo_hf.cli.main import main
from olmo_hf.training import commit
from olmo_hf.training.state import load_run_state
from tests import runs
from tests.invariants.test_restart import final, read
from tests.served import Ranks


@pytest.fixture(scope="module")
def plain(one: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve steps with a checkpoint at step 2, whose order of data is the measure."""
    directory = tmp_path_factory.mktemp("plain")
    one.run(runs.write_run(directory, save_interval=2, save_interval_ephemeral=None))
    return directory / "run"


@pytest.mark.parametrize(
    ("setting", "reads"),
    [
        pytest.param({"fast_forward_batches": 2}, {3: 5, 4: 6, 8: 10}, id="fast-forward"),
        pytest.param({"start_epoch": 1}, {3: 6, 4: 7, 7: 10}, id="epoch"),
        pytest.param({"restore_dataloader": False}, {3: 1, 4: 2, 8: 6}, id="data-from-the-start"),
        pytest.param({"restore_dataloader": False, "fast_forward_batches": 1}, {3: 2, 8: 7}, id="both"),
    ],
)
def test_the_data_are_moved_once(
    one: Ranks, plain: Path, tmp_path: Path, setting: dict[str, Any], reads: dict[int, int]
) -> None:
    """Step of the second run -> step of the plain run with the same instances; two restarts change nothing."""
    source = str(plain / "checkpoint-2")
    whole, parts = (
        runs.write_run(tmp_path / name, resume=source, max_duration=8, **setting) for name in ("whole", "parts")
    )
    one.run(whole)
    for words in (("--training.stop_at=4",), ("--training.stop_at=7",), ()):
        one.run(parts, *words)
    expected, found = read(plain)[0], read(tmp_path / "parts" / "run")[0]
    assert list(found) == list(range(3, 9))
    assert {step: found[step] for step in reads} == {step: expected[there] for step, there in reads.items()}
    assert found == read(tmp_path / "whole" / "run")[0]
    runs.same_run(tmp_path / "parts" / "run", tmp_path / "whole" / "run", range(3, 9))
    assert main(["inspect-data", str(tmp_path / "parts" / "run"), "--recorded"]) == 0
    assert final(tmp_path / "parts" / "run") == final(tmp_path / "whole" / "run")


def test_counters_start_from_zero_once(one: Ranks, plain: Path, tmp_path: Path) -> None:
    """A second stage: the weights and moments of the first, other data, and a clock of its own."""
    settings = {"resume": str(plain), "reset_trainer_state": True, "max_duration": 6}
    whole, parts = (runs.write_run(tmp_path / name, **settings) for name in ("whole", "parts"))
    one.run(whole, "--data.seed=7")
    for words in (("--training.stop_at=2",), ("--training.stop_at=4",), ()):
        one.run(parts, "--data.seed=7", *words)
    run_dir = tmp_path / "parts" / "run"
    state = load_run_state(run_dir / "latest")
    assert (state.step, state.tokens, state.position.epoch, state.position.instances) == (6, 768, 1, 8)
    assert sorted(runs.losses(run_dir)) == list(range(1, 7))
    runs.same_run(run_dir, tmp_path / "whole" / "run", range(1, 7))
    assert final(run_dir) == final(tmp_path / "whole" / "run")
    rates = [rate for _, _, rate in runs.losses(run_dir).values()]
    assert rates[0] < rates[1] > rates[2], "the schedule warms up anew"
    fresh = runs.losses(plain)[1][0]
    assert runs.losses(run_dir)[1][0] < fresh - 0.05, "the weights are those of the first stage"


def test_a_second_stage_still_has_the_same_model(one: Ranks, plain: Path, tmp_path: Path) -> None:
    config = runs.write_run(tmp_path, resume=str(plain), reset_trainer_state=True)
    assert one.codes(config, "--data.seed=7", "--model.config.hidden_size=48") == [2]
    text = (tmp_path / "log.txt").read_text()
    assert "hidden_size was 32 and is now 48" in text
    assert "Traceback" not in text


def test_another_rule_is_refused_with_what_to_do(one: Ranks, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain.parent, tmp_path / "copy", symlinks=True)
    config = tmp_path / "copy" / "run.yaml"
    words = (f"--training.output_dir={tmp_path}/copy/run", "--training.max_duration=14", "--training.optimizer=lion")
    assert one.codes(config, *words) == [2]
    text = (tmp_path / "copy" / "log.txt").read_text()
    assert "holds the optimizer state of AdamW and this launch uses Lion" in text
    assert "Traceback" not in text
    other = runs.write_run(tmp_path / "other", resume=str(plain), reset_optimizer=True, max_duration=14)
    one.run(other, "--training.optimizer=lion")
    assert sorted(runs.losses(tmp_path / "other" / "run")) == [13, 14]


def test_both_families_in_one_directory(fsdp: Ranks, tmp_path: Path) -> None:
    """Each kind by its own interval and its own number to keep; neither pushes the other out."""
    config = runs.write_run(
        tmp_path,
        save_interval=3,
        keep_sharded=1,
        save_interval_unsharded=4,
        keep_unsharded=2,
        save_interval_ephemeral=1,
    )

    def kinds() -> dict[str, str]:
        run_dir = tmp_path / "run"
        return {path.name: commit.verify(path).kind for path in commit.list_checkpoints(run_dir)}

    fsdp.run(config, "--training.stop_at=10")
    assert kinds() == {"checkpoint-10": "unsharded", "checkpoint-9": "sharded", "checkpoint-8": "unsharded"}
    fsdp.run(config)
    assert kinds() == {"checkpoint-12": "unsharded", "checkpoint-10": "unsharded", "checkpoint-9": "sharded"}
