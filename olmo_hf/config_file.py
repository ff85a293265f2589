"""A run's YAML file and command line, read into `RunArgs`; and `RunArgs` written back.

Identical to reading the YAML with OmegaConf and merging dotted overrides, except that every value is read as its field
declares it, unknown keys are refused, and all problems come in one `ConfigError`. Nothing here imports torch, and
transformers is imported only for keys that transformers declares.
"""

import copy
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from olmo_hf.args import RunArgs
from olmo_hf.errors import ConfigError
from olmo_hf.settings.checks import check_run
from olmo_hf.settings.declared_elsewhere import take_architecture, take_training_arguments
from olmo_hf.settings.overrides import apply_overrides, split_overrides
from olmo_hf.settings.problems import Problems
from olmo_hf.settings.source import read_yaml, resolve
from olmo_hf.settings.values import members, read_value


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunArgs:
    """Reads a configuration.

    Args:
        path: YAML file with the sections `name`, `model`, `data`, `training`, `callbacks`, `evaluation`.
        overrides: words of a command line: `--section.field=value`, `--section.field value`, `--section.switch`,
            `--no-section.switch`; names may be written with `-` for `_`.

    Raises:
        ConfigError: the file cannot be read, or the settings are wrong; then it lists every problem found.
    """
    return run_from_tree(read_yaml(Path(path)), overrides)


def run_from_tree(given: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunArgs:
    """Identical to `load_run` except that the YAML is read already; `given` is left as it is."""
    problems = Problems()
    tree = copy.deepcopy(dict(given))
    apply_overrides(tree, split_overrides(overrides, problems), problems)
    tree = resolve(tree, problems)
    further = take_training_arguments(tree, problems)
    architecture = take_architecture(tree, problems)
    run = read_value(tree, RunArgs, "", problems) or RunArgs()
    run = dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, config=architecture),
        training=dataclasses.replace(run.training, transformers=further),
    )
    check_run(run, problems)
    if problems.sentences:
        raise ConfigError(problems.sentences)
    return run


def run_to_yaml(run: RunArgs) -> str:
    """Every setting of a run as YAML; `load_run` on it gives the identical `RunArgs`."""
    tree = _plain(run)
    tree["training"] |= tree["training"].pop("transformers")
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as the mappings and lists that YAML has; equal settings become equal text."""
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        return {name: _as_declared(_plain(getattr(value, name)), hint) for name, hint in hints.items()}
    if isinstance(value, dict):
        return {name: _plain(value[name]) for name in sorted(value)}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _as_declared(value: Any, hint: Any) -> Any:
    """A default written as `100` in a field of type float is 100.0, as it is when read."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if is_whole and float in members(hint) and int not in members(hint) else value
