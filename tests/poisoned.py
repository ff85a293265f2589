"""A run whose loss jumps at steps that are known beforehand: there it reads instances that are like no others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from olmo_hf.cli.inspect_data import open_run_data
from olmo_hf.data.inspection import ids_of_step
from tests import runs

SPIKE = {"window_steps": 8, "min_steps": 3, "threshold": 1.2}
"""The usual losses fall at every step, towards ln 3 = 1.1; an instance of unseen tokens has one of 5 to 9."""


def write_poisoned_run(
    directory: Path,
    batches: Sequence[int],
    *,
    max_rollbacks: int = 0,
    steps: int = 12,
    instances: int = 160,
    **training: object,
) -> Path:
    """As `runs.write_run`, without an epoch's end; returns the YAML.

    Args:
        directory: everything is written here.
        batches: global batches, from 1, in which every instance is poison.
        max_rollbacks: `callbacks.loss_spike.max_rollbacks`.
        steps: length of the run.
        instances: of the data.
        training: further settings of the `training` section.
    """
    options: dict[str, Any] = {
        "learning_rate": 0.03,
        "save_interval": 4,
        "save_interval_ephemeral": None,
        "max_duration": steps,
        **training,
    }
    config = runs.write_run(directory, **options)
    settings = yaml.safe_load(config.read_text())
    settings["callbacks"]["loss_spike"] = {**SPIKE, "max_rollbacks": max_rollbacks}
    config.write_text(yaml.safe_dump(settings))
    random = np.random.default_rng(3)
    tokens = random.integers(2, 5, (instances, 16), dtype=np.uint16)
    tokens.tofile(directory / "tokens.npy")
    _, order = open_run_data(config, [], 1)
    for batch in batches:
        tokens[ids_of_step(order, batch)] = random.integers(50, 100, (8, 16), dtype=np.uint16)
    tokens.tofile(directory / "tokens.npy")
    return config
