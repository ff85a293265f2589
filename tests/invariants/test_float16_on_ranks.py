"""float16 on two ranks, copies or shards: losses of float32, and an overflow is left out by both ranks alike."""

import json
import math
from pathlib import Path

import pytest

from tests import runs
from tests.invariants.test_split import FSDP

STEPS = 6


def train(directory: Path, *, scale: float, env: dict[str, str], **training: object) -> list[dict[str, float]]:
    config = runs.write_run(
        directory, dropout=0.0, max_duration=STEPS, save_interval=None, learning_rate=1e-3, **training
    )
    script = Path(__file__).parent / "float16_on_cpu.py"
    process = runs.start(config, processes=2, script=script, SCALE=str(scale), **env)
    assert process.wait(timeout=240) == 0, (directory / "log.txt").read_text(errors="replace")[-4000:]
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "train/CrossEntropyLoss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, FSDP], ids=["ddp", "fsdp2"])
def test_ranks_agree_on_what_overflowed_and_losses_follow_float32(tmp_path: Path, env: dict[str, str]) -> None:
    exact = train(tmp_path / "fp32", scale=1.0, env=env)
    half = train(tmp_path / "fp16", scale=2.0**10, env=env, fp16=True)
    for one, other in zip(exact, half, strict=True):
        # Rounding to float16 is 2**-11 of a value; a loss averages it over the tokens.
        assert other["train/CrossEntropyLoss"] == pytest.approx(one["train/CrossEntropyLoss"], rel=2**-11)
        assert other["optim/total_grad_norm"] == pytest.approx(one["optim/total_grad_norm"], rel=2**-6)
        assert other["train/skipped_steps"] == 0
    assert [row["train/CrossEntropyLoss"] for row in exact] != [row["train/CrossEntropyLoss"] for row in half]

    found = train(tmp_path / "overflow", scale=2.0**26, env=env, fp16=True)
    skipped = [row["train/skipped_steps"] for row in found]
    assert 1 <= skipped[-1] < STEPS - 1
    assert skipped == [min(step, skipped[-1]) for step in range(1, STEPS + 1)]
    assert all(math.isfinite(row["train/CrossEntropyLoss"] or math.nan) for row in found[int(skipped[-1]) :])
    assert found[-1]["throughput/total_tokens"] == STEPS * 128
