"""A run from a file of either kind: ours, or one of the original OLMo trainer, which is translated on the way."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from olmo_hf.args import RunArgs
from olmo_hf.config_file import load_run, run_from_tree
from olmo_hf.errors import ConfigError
from olmo_hf.model.conversion.architecture import ORIGINAL_DEFAULTS
from olmo_hf.recipes.import_config import import_config, report_lines
from olmo_hf.recipes.original_defaults import DATA
from olmo_hf.recipes.original_file import is_original
from olmo_hf.settings.source import read_yaml

_OUR_SECTIONS = ("name", "training", "callbacks", "evaluation")


def load_any_run(path: Path, overrides: Sequence[str] = ()) -> RunArgs:
    """Reads a configuration of ours, or one of the original as written (or, with `--as=executed`, as it was run).

    Args:
        path: The YAML file.
        overrides: Words of the command line. With a file of the original they may be in its style
            (`--optimizer.learning_rate=9e-4`) or in ours (`--training.learning_rate=9e-4`), each with `=`.

    Raises:
        ConfigError: The settings are wrong, or the original asks for something that does not exist here.
    """
    if not is_original(read_yaml(path)):
        return load_run(path, overrides)
    mode, words = _mode(overrides)
    theirs, ours = split_by_style(words)
    imported = import_config(path, theirs, executed=mode == "executed")
    refused = imported.ledger.refused()
    if refused:
        problems = [f"{verdict.key}: {verdict.note}" for verdict in refused]
        raise ConfigError([f"{path} is a configuration of the original trainer; of it is refused:", *problems])
    if int(os.environ.get("RANK", "0")) == 0:
        said = "\n  ".join(report_lines(imported, every_key=False))
        sys.stderr.write(f"a configuration of the original OLMo trainer, read as {mode}:\n  {said}\n")
    return run_from_tree(imported.tree, ours)


def _mode(words: Sequence[str]) -> tuple[str, list[str]]:
    """What `--as` says, and the other words."""
    mode, rest, waiting = "written", [], False
    for word in words:
        if waiting or word.startswith("--as="):
            mode, waiting = word.removeprefix("--as="), False
        elif word == "--as":
            waiting = True
        else:
            rest.append(word)
    if waiting or mode not in ("written", "executed"):
        raise ConfigError(f"--as: found {'nothing' if waiting else repr(mode)}, expected written or executed")
    return mode, rest


def split_by_style(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides in the original's style, and in ours. `model` and `data` exist in both: the key below decides."""
    theirs: list[str] = []
    ours: list[str] = []
    for word in words:
        names = word.lstrip("-").partition("=")[0].replace("-", "_").split(".")
        below = names[1] if len(names) > 1 else ""
        is_ours = names[0] in _OUR_SECTIONS
        if names[0] == "model":
            is_ours = below not in ORIGINAL_DEFAULTS
        elif names[0] == "data":
            is_ours = below not in DATA
        (ours if is_ours else theirs).append(word)
    return theirs, ours
