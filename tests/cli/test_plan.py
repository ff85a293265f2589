"""`olmo-hf plan` and `train_hf.py --dry_run --skip_data` as a person types them."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from olmo_hf.cli.main import main
from olmo_hf.training.state import RunState, save_run_state
from tests.recipes.original import write

ROOT = Path(__file__).parent.parent.parent
SMALL = str(ROOT / "configs" / "half_billion" / "small.yaml")
LIMIT_SECONDS = 20


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def rows_of(text: str) -> dict[str, str]:
    return dict(line.split("  ", 1) for line in text.splitlines() if "  " in line)


def test_the_plan_says_what_matters(capsys):
    words = ["plan", SMALL, "--num-processes", "2", "--device", "A100", "--cost-per-device-hour", "2", "--hours", "3"]
    assert main([*words, "--schedule", "lr.png", "--training.max_duration=500"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert "500 steps" in rows["run"]
    assert rows["batch"].strip().endswith("(2 devices x 8 instances x 4 accumulation steps)")
    assert {"model", "memory per device", "learning rate", "time", "cost", "for 3 h"} <= rows.keys()
    assert Path("lr.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_warm_up_begins_where_the_checkpoint_stands(tmp_path, capsys):
    save_run_state(RunState(step=100, tokens=100 * 64 * 512), tmp_path)
    words = ["plan", SMALL, "--training.max_duration=500", f"--training.resume={tmp_path}"]
    words += ["--training.reset_optimizer=true", "--training.bolt_on_warmup=10", "--schedule", "lr.png"]
    assert main([*words, "--training.learning_rate_factors={'*embed_tokens*': 0.5}"]) == 0
    rows = rows_of(capsys.readouterr().out)
    first, second = rows["learning rate"].strip().split(", ")[:2]
    assert first.endswith(" at 101")
    assert float(first.split()[0]) < 0.2 * float(second.split()[0])
    assert rows["times a factor"].strip() == "*embed_tokens*: 0.5"


def test_a_picture_that_cannot_be_drawn_is_an_error_in_words(tmp_path, capsys):
    assert main(["plan", SMALL, "--schedule", str(tmp_path / "no" / "such" / "lr.png")]) == 2
    assert "--schedule: " in capsys.readouterr().err


def test_a_file_of_the_original_is_planned_too(tmp_path, capsys):
    assert main(["plan", str(write(tmp_path)), "--optimizer.learning_rate=5e-4"]) == 0
    assert "5.000e-04" in rows_of(capsys.readouterr().out)["learning rate"]


def test_large_runs_need_no_device(capsys):
    for name, processes in (("olmo2_7b", 8), ("olmo2_13b", 1024)):
        words = ["plan", str(ROOT / "configs" / name / "stage1.yaml"), "--num-processes", str(processes)]
        assert main([*words, "--device", "h100-80gb", "--replicas", "2", "--write-gb-per-second", "10"]) == 0
        rows = rows_of(capsys.readouterr().out)
        assert {
            "step",
            "tokens per day",
            "device hours",
            "data read",
            "checkpoint",
            "fits",
            "exchanged per step",
        } <= rows.keys()
        assert f"{processes:,} devices for" in rows["device hours"]
    # 13,716,198,400 parameters of 4 bytes, and twice that for the moments, at 10 GB/s
    assert "164.59 GB with the optimizer, 16 s to write" in rows["checkpoint"]


def test_what_cannot_be_is_refused_at_once(capsys):
    words = ["--num-processes", "8", "--replicas", "3", "--utilisation", "40", "--write-gb-per-second", "0"]
    assert main(["plan", SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in ("--replicas", "--utilisation", "--write-gb-per-second"))


def test_an_unknown_device_is_named(capsys):
    assert main(["plan", SMALL, "--device", "abacus"]) == 2
    assert "--peak-flops" in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_refused(capsys):
    assert main(["plan", SMALL, "--num-processes", "7"]) == 2
    assert "training.global_train_batch_size" in capsys.readouterr().err


def dry_run(*words: str) -> tuple[subprocess.CompletedProcess, float]:
    """The finished process, and the seconds of processor time it took: a busy machine changes only the others."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, str(ROOT / "train_hf.py"), *words, "--dry_run", "--skip_data"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_dry_run_without_data(tmp_path):
    found, _ = dry_run(str(ROOT / "configs" / "olmo2_7b" / "stage2_seed42.yaml"))
    assert found.returncode == 0, found.stderr
    rows = rows_of(found.stdout)
    assert "7,298,617,344 parameters" in rows["model"]
    assert "11,921 steps" in rows["run"]
    assert rows["memory per device"].strip().startswith("about")
    assert not (tmp_path / "runs").exists()


def test_skipping_data_is_for_dry_runs():
    command = [sys.executable, str(ROOT / "train_hf.py"), SMALL, "--skip_data"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 2
    assert "--dry_run" in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_run_is_planned_in_time(path):
    found, seconds = dry_run(str(path))
    assert found.returncode == 0, found.stderr
    assert seconds < LIMIT_SECONDS
