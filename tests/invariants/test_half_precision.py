"""bfloat16 follows float32, alone and on shards; the band is what rounding to 8 bits makes of a loss near 4.85."""

from pathlib import Path

import pytest
import torch

from tests import runs
from tests.invariants.test_split import FSDP

STEPS = 6


def trained(directory: Path, *, processes: int = 1, env: dict[str, str] | None = None, **training: object) -> dict:
    config = runs.write_run(
        directory, dropout=0.0, max_duration=STEPS, save_interval=None, learning_rate=1e-3, **training
    )
    runs.run(config, processes=processes, **(env or {}))
    return runs.losses(directory / "run")


@pytest.mark.slow
def test_bfloat16_follows_float32_on_one_process_and_on_shards(tmp_path):
    exact = trained(tmp_path / "fp32")
    found = {
        "alone": trained(tmp_path / "alone", bf16=True, use_cpu=True),
        "shards": trained(tmp_path / "shards", bf16=True, use_cpu=True, processes=2, env=FSDP),
        "plain": trained(
            tmp_path / "plain", bf16=True, use_cpu=True, processes=2, env=FSDP, loss_implementation="plain"
        ),
    }
    for kind, losses in found.items():
        assert set(losses) == set(exact), kind
        for step, (cross_entropy, grad_norm, rate) in losses.items():
            # Rounding to bfloat16 is 2**-9 of a value; a loss averages it over 128 tokens (measured: 1e-4, 2e-3).
            assert cross_entropy == pytest.approx(exact[step][0], rel=2**-11), (kind, step)
            assert grad_norm == pytest.approx(exact[step][1], rel=2**-6), (kind, step)
            assert rate == exact[step][2], (kind, step)
        assert any(losses[step] != exact[step] for step in losses), "half precision was not used"
        # The logged loss itself is not rounded to bfloat16: six values of 8 bits by chance is one in 10**14.
        assert any(float(value) != rounded(value) for value, _, _ in losses.values()), kind


def rounded(value: float) -> float:
    return torch.tensor(value).bfloat16().item()
