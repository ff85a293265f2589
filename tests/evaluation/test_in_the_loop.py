"""Evaluation inside real runs on several ranks: the figures of one rank, sharded or not."""

from pathlib import Path

import pytest

from olmo_hf.callbacks.json_lines import METRICS_FILE, read_json_lines
from tests import runs
from tests.callbacks.test_with_trainer import write_evaluated_run

SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


def held_out(run_dir: Path) -> dict[int, float]:
    rows = read_json_lines(run_dir / METRICS_FILE)
    name = "eval/held-out/CrossEntropyLoss"
    return {row["step"]: row[name] for row in rows if name in row}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, SHARDED], ids=["ddp", "fsdp2"])
def test_two_ranks_say_what_one_says(tmp_path: Path, environment: dict[str, str]) -> None:
    # Five instances on two ranks in batches of two: one rank has a filler in each batch.
    options = {"max_duration": 4, "per_device_eval_batch_size": 2, "dropout": 0.0}
    runs.run(write_evaluated_run(tmp_path / "one", **options))
    runs.run(write_evaluated_run(tmp_path / "two", **options), processes=2, **environment)
    one, two = held_out(tmp_path / "one" / "run"), held_out(tmp_path / "two" / "run")
    assert list(one) == list(two) == [0, 2, 4]
    assert two[0] == pytest.approx(one[0], abs=1e-6), "the same weights: only the order of sums differs"
    assert two[4] == pytest.approx(one[4], abs=1e-5)
