"""A loss that is no number, in real processes: both ranks stop or skip together, and what was saved stays as it was.

One token that occurs in a single instance has an embedding that overflows float32 inside the model; all is finite
until the rank that reads this instance comes to it.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import build_model
from olmo_hf.training import commit
from tests import runs
from tests.served import Ranks

STEP, RANK, TOKEN = 3, 1, 127


def write_poisoned_run(directory: Path, instance: int | None, **training: object) -> Path:
    """A run of 5 steps over one epoch; the instance, if any, holds the token whose embedding overflows."""
    config = runs.write_run(
        directory, dropout=0.0, max_duration=5, save_interval=2, save_interval_ephemeral=None, **training
    )
    if instance is not None:
        tokens = np.fromfile(directory / "tokens.npy", dtype=np.uint16)
        tokens[instance * 16 + 5] = TOKEN
        tokens.tofile(directory / "tokens.npy")
    settings = yaml.safe_load(config.read_text())
    model = build_model(ModelArgs(config=settings["model"]["config"]), seed=1)
    model.model.embed_tokens.weight.data[TOKEN] = 3e38
    model.save_pretrained(directory / "start")
    settings["model"] = {"init_from": str(directory / "start")}
    config.write_text(yaml.safe_dump(settings))
    return config


@pytest.fixture(scope="module")
def instance(ddp: Ranks, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What rank 1 reads in step 3 of the run without the token, which goes through."""
    directory = tmp_path_factory.mktemp("good")
    ddp.run(write_poisoned_run(directory, None))
    return read_data_indices(data_indices_path(directory / "run", RANK))[STEP][0]


def rows_of(run_dir: Path) -> dict[int, dict]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "train/CrossEntropyLoss" in row}


def test_both_ranks_stop_and_the_one_that_has_it_is_named(ddp: Ranks, tmp_path: Path, instance: int) -> None:
    config = write_poisoned_run(tmp_path, instance)
    assert ddp.codes(config) == [2, 2]
    text = (tmp_path / "log.txt").read_text()
    assert f"step {STEP}, rank {RANK}: the update is not a number" in text
    assert f"rank {RANK} (loss nan) read the instances [{instance}, " in text
    assert "Traceback" not in text
    for rank in (0, 1):
        read = read_data_indices(data_indices_path(tmp_path / "run", rank))
        assert list(read) == [1, 2, 3], "what the last step read is on record"
        assert (instance in read[STEP]) is (rank == RANK)
    assert list(rows_of(tmp_path / "run")) == [1, 2], "nothing is logged for the step, least of all a loss of 0"
    kept = commit.list_checkpoints(tmp_path / "run")
    assert [path.name for path in kept] == ["checkpoint-2"]
    commit.verify(kept[0])


def test_skipping_goes_on_and_counts(ddp: Ranks, tmp_path: Path, instance: int) -> None:
    config = write_poisoned_run(tmp_path, instance, nan_policy="skip")
    ddp.run(config)
    rows = rows_of(tmp_path / "run")
    assert [rows[step]["train/skipped_steps"] for step in range(1, 6)] == [0, 0, 1, 1, 1]
    losses = [rows[step]["train/CrossEntropyLoss"] for step in range(1, 6)]
    assert [not isinstance(loss, float) or math.isnan(loss) for loss in losses] == [False, False, True, False, False]
    commit.verify(tmp_path / "run" / "checkpoint-5")
