"""Steps of a run trained again: bitwise the record, over restarts, and the run directory stays as it is."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from olmo_hf.cli.main import main
from olmo_hf.errors import DataError
from olmo_hf.replay.record import read_record
from olmo_hf.replay.rerun import quiet
from olmo_hf.replay.way import find_way
from olmo_hf.training.args import TrainingArgs
from tests import runs
from tests.forks import Forks
from tests.poisoned import write_poisoned_run


def state_of(run_dir: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file."""
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(run_dir.rglob("*"))}


def replay(run_dir: Path, step: int, tmp_path: Path, *words: str) -> tuple[int, dict]:
    """Exit code and JSON of a replay in this process."""
    out = tmp_path / f"{step}.json"
    code = main(["replay", str(run_dir), "--step", str(step), "--json", str(out), *words])
    return code, json.loads(out.read_text())


# One of each third: before the checkpoint of step 4, up to the restart at step 8, and after it.
@pytest.mark.parametrize("step", [random.Random(8 + first).choice(range(first, first + 4)) for first in (1, 5, 9)])
def test_random_steps_of_a_run_with_a_restart(restarted: Path, tmp_path: Path, step: int) -> None:
    before = state_of(restarted)
    code, told = replay(restarted, step, tmp_path)
    assert code == 0
    assert told["equal"] is True
    assert told["largest_difference"] == 0
    assert told["tolerance"] == 0
    assert told["steps"][-1]["step"] == step
    recorded = runs.losses(restarted)[step]
    assert [one["recorded"] for one in told["steps"][-2:]] == list(recorded[:2])
    assert state_of(restarted) == before, "the run directory is only read"


def test_the_number_of_threads_is_not_set_to_what_it_is(
    restarted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting it, even to what it is, takes MKL's dynamic mode away: with two threads and more, other last bits."""
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    assert replay(restarted, 3, tmp_path)[0] == 0
    assert told == []


@pytest.mark.parametrize(("given", "taken"), [(None, "3"), ("2", "2")])
def test_a_replay_starts_with_the_threads_of_the_run(tmp_path: Path, given: str | None, taken: str) -> None:
    """Before torch is there, and unless somebody has said how many."""
    (tmp_path / "launches.jsonl").write_text('{"threads": 3}\n{"threads": 1}\n{}\n')
    program = (
        "import os, sys; from pathlib import Path; from olmo_hf.cli.replay import take_threads_of; "
        "take_threads_of(Path(sys.argv[1])); assert 'torch' not in sys.modules; print(os.environ['OMP_NUM_THREADS'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {} if given is None else {"OMP_NUM_THREADS": given}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == taken


def test_the_way_leads_over_the_restart(restarted: Path) -> None:
    way = find_way(read_record(restarted), 10)
    assert way.checkpoint == restarted / "checkpoint-8"
    first = find_way(read_record(restarted), 3)
    assert first.checkpoint is None, "the checkpoint from before the first step has given way to the first real one"
    assert [(s.first_step, s.last_step) for s in first.segments] == [(0, 3)]
    with pytest.raises(DataError, match=r"step 9 was trained 2 times; count from 1"):
        find_way(read_record(restarted), 9, attempt=5)
    assert len(read_record(restarted).attempts(9)) == 2


def test_a_record_that_was_changed_is_told(restarted: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    copy = tmp_path / "run"
    shutil.copytree(restarted, copy, symlinks=True)
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    assert row["step"] == 12
    row["train/CrossEntropyLoss"] = row["train/CrossEntropyLoss"] * (1 + 1e-15)
    (copy / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(row)]) + "\n")
    code, told = replay(copy, 12, tmp_path)
    assert code == 1
    assert told["equal"] is False
    assert "NOT equal to the last bit" in capsys.readouterr().out
    assert replay(copy, 12, tmp_path, "--tolerance", "1e-12")[0] == 0


def test_without_its_newer_checkpoints_it_begins_earlier(restarted: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(restarted, copy, symlinks=True)
    shutil.rmtree(copy / "checkpoint-8")
    damaged = copy / "checkpoint-4" / "model.safetensors"
    code, told = replay(copy, 11, tmp_path)
    assert (code, told["checkpoint"], told["first_step"], told["largest_difference"]) == (0, "checkpoint-4", 5, 0)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    code, told = replay(copy, 11, tmp_path)
    assert (code, told["checkpoint"], told["largest_difference"]) == (0, None, 0)
    assert "checkpoint-4" in " ".join(told["notes"])


def test_settings_that_changed_at_a_restart_and_means_over_steps(forks: Forks, tmp_path: Path) -> None:
    config = runs.write_run(tmp_path, save_interval=4, save_interval_ephemeral=None, logging_steps=3)
    forks.run(config, "--training.stop_at=4")
    forks.run(config, "--training.learning_rate=0.003", "--training.weight_decay=0.3", "--training.stop_at=8")
    forks.run(config, "--training.per_device_train_batch_size=4")
    for step in (4, 8):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    code, told = replay(tmp_path / "run", 12, tmp_path)
    assert {one["step"] for one in told["steps"]} == {3, 4, 6, 8, 9, 12}
    assert (code, told["largest_difference"]) == (0, 0)
    assert len(find_way(read_record(tmp_path / "run"), 12).segments) == 3


def test_a_spike_from_which_the_run_went_back(forks: Forks, tmp_path: Path) -> None:
    config = write_poisoned_run(tmp_path, (7,), max_rollbacks=1)
    forks.run(config)
    run_dir = tmp_path / "run"
    code, told = replay(run_dir, 7, tmp_path, "--attempt", "1")
    assert (code, told["checkpoint"], told["largest_difference"]) == (0, "checkpoint-4", 0)
    spike = told["steps"][-2]["found"]
    code, told = replay(run_dir, 7, tmp_path)
    assert (code, told["checkpoint"], told["largest_difference"]) == (0, "checkpoint-4", 0)
    assert told["steps"][-2]["found"] < spike - 2, "on the batches behind those that were passed over"


def test_nothing_is_left_behind_or_sent_away() -> None:
    noisy = TrainingArgs(upload_to="s3://bucket/run", report_to=("wandb",), save_interval=10, checkpoint_async=True)
    silent = quiet(noisy, last_step=7)
    assert (silent.upload_to, silent.report_to, silent.save_interval, silent.stop_at) == (None, (), None, 7)
    assert not silent.checkpoint_async
    assert not silent.save_at_start


def test_mistakes_are_told_in_words(restarted: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "holds no metrics.jsonl" in capsys.readouterr().err
    assert main(["replay", str(restarted), "--step", "99"]) == 2
    assert "has logged steps 1 to 12, of which the nearest are 11 and 12" in capsys.readouterr().err
    assert main(["replay", str(restarted), "--step", "0"]) == 2
    assert main(["replay", str(restarted), "--step", "3", "--tolerance", "nan"]) == 2


@pytest.mark.slow
def test_two_ranks_replay_what_two_ranks_trained(forks: Forks, tmp_path: Path) -> None:
    # Without dropout, whose masks are other ones on another number of ranks.
    config = runs.write_run(tmp_path, dropout=0.0, save_interval=4, save_interval_ephemeral=None)
    forks.run(config, ranks=2)
    words = ["-m", "olmo_hf.cli.main", "replay", str(tmp_path / "run"), "--step", "11", "--json"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launcher, *words, str(tmp_path / "two.json")], env=runs.environment(), check=True)
    told = json.loads((tmp_path / "two.json").read_text())
    assert (told["tolerance"], told["largest_difference"]) == (0, 0)
    subprocess.run([sys.executable, *words, str(tmp_path / "one.json")], env=runs.environment(), check=True)
    told = json.loads((tmp_path / "one.json").read_text())
    assert told["equal"] is True
    assert "2 processes" in told["notes"][0]
