"""A run longer than its data: the length asked for is reached, through as many epochs as that takes."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.errors import ConfigError
from olmo_hf.training.durations import duration_in_steps
from tests import runs
from tests.served import Ranks

TOKENS, TOKENS_PER_STEP = 640, 64


def test_two_thousand_tokens_of_640(one: Ranks, tmp_path: Path) -> None:
    """32 steps of 64 tokens, the first number that reaches 2,000; ten are an epoch, so the last is the fourth."""
    config = runs.write_run(tmp_path, global_train_batch_size=4, max_duration="2000T", save_interval=None)
    np.random.default_rng(0).integers(0, 100, TOKENS, dtype=np.uint16).tofile(tmp_path / "tokens.npy")
    settings = yaml.safe_load(config.read_text())
    settings["callbacks"]["data_indices"] = {"flush_steps": 1}
    config.write_text(yaml.safe_dump(settings))
    one.run(config)
    assert runs.logged_steps(tmp_path / "run") == list(range(1, 33))
    read = read_data_indices(data_indices_path(tmp_path / "run", 0))
    epochs = [[i for step in range(first, min(first + 10, 33)) for i in read[step]] for first in (1, 11, 21, 31)]
    assert [sorted(ids) for ids in epochs[:3]] == [list(range(40))] * 3
    assert len(set(epochs[3])) == 8
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(("length", "steps"), [("2000T", 32), ("2e3T", 32), ("2ep", 20), ("32", 32), (32, 32)])
def test_the_same_length_in_every_spelling(length: object, steps: int) -> None:
    per_epoch = TOKENS // TOKENS_PER_STEP
    assert duration_in_steps(length, tokens_per_step=TOKENS_PER_STEP, steps_per_epoch=per_epoch) == steps


def test_half_an_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'1\.5ep', but the number of epochs must be whole"):
        duration_in_steps("1.5ep", tokens_per_step=TOKENS_PER_STEP, steps_per_epoch=10)
