"""Points of a scaling law, read from run directories."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from olmo_hf.config_file import load_run
from olmo_hf.errors import ConfigError, DataError
from olmo_hf.model.build import build_config
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import count_parameters
from olmo_hf.recipes.scaling_law import Point
from olmo_hf.report.history import History, load_history

TRAINING_LOSS = "train/CrossEntropyLoss"
TAIL = 0.02
"""The training loss of a run is its mean over this last part of the run."""


def load_runs(directories: Sequence[Path], *, unfinished: bool = False) -> list[History]:
    """The records of runs that came to their planned end.

    Args:
        directories: Run directories.
        unfinished: Take runs that did not come to their end, too.

    Raises:
        DataError: A directory holds no run, or a run that is not finished; all of these at once.
    """
    runs = [load_history(directory.resolve()) for directory in directories]
    problems = [said for run in runs if (said := _why_not_finished(run)) is not None]
    if problems and not unfinished:
        raise DataError(
            "these runs cannot be compared with finished ones, because their learning rate has not come down:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\n  let them end, leave them out, or take them as they are with --unfinished"
        )
    return runs


def point_of(run: History, metric: str | None = None) -> Point:
    """Size, length and last loss of a run.

    Args:
        run: Its record.
        metric: Name in `metrics.jsonl`. None: the training loss, as the mean over the last fiftieth of the run.

    Raises:
        DataError: The run has no such metric, or its size cannot be found.
    """
    name = TRAINING_LOSS if metric is None else metric
    series = run.series.get(name)
    if series is None:
        known = ", ".join(key for key in sorted(run.series) if key.startswith("eval/") and "Entropy" in key)
        raise DataError(
            f"{run.run_dir}: has no metric {name!r}, expected one of its evaluations: "
            f"{known if known else 'it has none'}"
        )
    tokens = max(float(np.nanmax(one.tokens)) for one in run.series.values())
    values = series.values
    if metric is None:
        values = values[series.tokens > tokens * (1 - TAIL)]
        loss = float(values.mean())
    else:
        loss = float(values[-1])
    return Point(run.name, parameters_of(run.run_dir), tokens, loss)


def parameters_of(run_dir: Path) -> int:
    """Parameters without embeddings of the model of a run: of its newest checkpoint, or by its settings.

    Raises:
        DataError: There is neither.
    """
    for file in sorted(run_dir.glob("checkpoint-*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        return count_parameters(OlmoHfConfig.from_pretrained(file.parent)).non_embedding
    try:
        run = load_run(run_dir / "config.yaml")
        return count_parameters(build_config(run.model)).non_embedding
    except ConfigError as error:
        raise DataError(
            f"{run_dir}: has no checkpoint and no usable config.yaml to tell its size ({error}); leave it out"
        ) from error


def _why_not_finished(run: History) -> str | None:
    ends = run.events_called("end")
    if not ends:
        return f"{run.run_dir}: has no end on record; it is running, or was killed"
    step, wanted = ends[-1].get("step"), ends[-1].get("max_steps")
    if isinstance(step, int) and isinstance(wanted, int) and step < wanted:
        return f"{run.run_dir}: stopped at step {step:,} of {wanted:,}"
    return None
