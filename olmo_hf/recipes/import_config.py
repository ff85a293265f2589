"""From a configuration of the original OLMo trainer to one of ours, with a verdict on every key."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from olmo_hf.args import RunArgs
from olmo_hf.config_file import run_from_tree
from olmo_hf.errors import ConfigError
from olmo_hf.recipes.ledger import STATUSES, Ledger, Status, Verdict
from olmo_hf.recipes.original_defaults import (
    EMPTY_SECTIONS,
    as_the_original_reads_it,
    flat_defaults,
    is_of_its_type,
    write_out_empty_blocks,
)
from olmo_hf.recipes.original_file import OriginalFile, flatten, read_original
from olmo_hf.recipes.translate_data import translate_data, translate_evaluators
from olmo_hf.recipes.translate_model import (
    translate_activation_checkpointing,
    translate_model,
    translate_tokenizer,
)
from olmo_hf.recipes.translate_run import (
    translate_launch,
    translate_name,
    translate_reporting,
    translate_restart,
    translate_saving,
    translate_stopping,
)
from olmo_hf.recipes.translate_training import (
    translate_batch,
    translate_clipping,
    translate_length,
    translate_loss,
    translate_optimizer,
    translate_precision,
    translate_scheduler,
)

_ORIGINAL_SEQUENCE_LENGTH = 1024
_SECTIONS = ("name", "model", "data", "training", "callbacks", "evaluation")
_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Imported:
    """The outcome.

    Attributes:
        source: The file of the original.
        tree: Our configuration as plain mappings.
        ledger: Every key and its verdict.
        launch_file: File of `accelerate_configs/` that spreads the run as the original did.
        open_problems: What our loader says against the result; empty when it can be used as it is.
    """

    source: Path
    tree: dict[str, Any]
    ledger: Ledger
    launch_file: str
    open_problems: tuple[str, ...]


def import_config(path: Path, overrides: Sequence[str] = (), *, executed: bool = False) -> Imported:
    """Translates a file of the original.

    Args:
        path: The YAML file.
        overrides: Words in the original's style.
        executed: Where the original did something else than its file says, translate what it did.

    Raises:
        ConfigError: The file cannot be read at all. What cannot be translated is in the result.
    """
    original = read_original(path, overrides)
    original.tree = as_the_original_reads_it(original.tree)
    empty: dict[str, Status] = {key: "without effect" for key in EMPTY_SECTIONS if original.tree.get(key) == {}}
    empty |= {key: "translated" for key in write_out_empty_blocks(original.tree)}
    defaults = flat_defaults()
    ledger = Ledger(_given(original), defaults, executed)
    for key, status in empty.items():
        note = "empty: the original's defaults" if key in EMPTY_SECTIONS else "empty: on, with the original's defaults"
        ledger.verdicts[key] = Verdict(key, {}, status, note=note)
    for key, reason in original.unresolved.items():
        ledger.verdicts[key] = Verdict(key, ledger.given[key], "refused", note=f"{reason}; give --{key}=VALUE")
    for key, value in ledger.given.items():
        if key not in original.unresolved and not is_of_its_type(key, value):
            ledger.verdicts[key] = Verdict(key, value, "refused", note="the original takes no such value here")
    ledger.given = {key: value for key, value in ledger.given.items() if key not in ledger.verdicts}
    launch_file = _translate(ledger, original)
    for key in ledger.below(""):
        ledger.refuse(key, _why_left_over(key, defaults))
    tree = _as_tree(ledger)
    return Imported(path, tree, ledger, launch_file, tuple(_open_problems(tree)))


def _why_left_over(key: str, defaults: Mapping[str, Any]) -> str:
    if key in defaults:
        return "its form is not understood"
    if key in ("model", "evaluators") or any(known.startswith(f"{key}.") for known in defaults):
        return "a section with keys of its own is expected here"
    return "the original has no such key"


def _given(original: OriginalFile) -> dict[str, Any]:
    given = {key: value for key, value in flatten(original.tree).items() if key}
    return given | {key: "${...}" for key in original.unresolved}


def _translate(ledger: Ledger, original: OriginalFile) -> str:
    model, data = (original.tree.get(name) for name in ("model", "data"))
    model = model if isinstance(model, dict) else {}
    data = data if isinstance(data, dict) else {}
    listed = original.tree.get("evaluators")
    length = model.get("max_sequence_length")
    sequence_length = length if isinstance(length, int) else _ORIGINAL_SEQUENCE_LENGTH
    translate_name(ledger)
    translate_model(ledger, model)
    translate_tokenizer(ledger)
    translate_activation_checkpointing(ledger)
    translate_data(ledger, data, sequence_length=sequence_length)
    ledger.keep("seed", "training.seed")
    translate_batch(ledger)
    translate_optimizer(ledger)
    translate_scheduler(ledger)
    translate_length(ledger, sequence_length=sequence_length)
    translate_clipping(ledger)
    translate_loss(ledger)
    translate_precision(ledger)
    translate_saving(ledger)
    translate_restart(ledger)
    translate_stopping(ledger)
    translate_reporting(ledger)
    translate_evaluators(ledger, listed if isinstance(listed, list) else [], sequence_length=sequence_length)
    return translate_launch(ledger)


def _as_tree(ledger: Ledger) -> dict[str, Any]:
    """Our settings as nested mappings; defaults of the original that are ours too are left to the reader's eye."""
    own = flatten(dataclasses.asdict(RunArgs()))
    for ours in list(ledger.filled):
        if ours in own and own[ours] == ledger.settings.get(ours):
            del ledger.filled[ours], ledger.settings[ours]
    tree: dict[str, Any] = {section: {} for section in _SECTIONS}
    for key, value in ledger.settings.items():
        *blocks, last = key.split(".")
        node = tree
        for block in blocks:
            node = node.setdefault(block, {})
        node[last] = value
    return {section: content for section, content in tree.items() if content != {}}


def _open_problems(tree: dict[str, Any]) -> list[str]:
    try:
        run_from_tree(tree)
    except ConfigError as error:
        return error.problems
    return []


def to_yaml(imported: Imported, target: Path) -> str:
    """Our file, opened by where it comes from, how to launch it and what did not go over."""
    ledger = imported.ledger
    mode = "as the original ran it" if ledger.executed else "as written"
    lines = [
        f"# {ledger.settings['name']}: imported from {imported.source.name} of the original OLMo trainer, {mode}.",
        "#",
        f"#   accelerate launch --config_file accelerate_configs/{imported.launch_file} train_hf.py {target}",
        "#",
        f"# {_counts(ledger)}.",
    ]
    lines += [f"# Refused: {verdict.key}: {verdict.note}." for verdict in ledger.refused()]
    lines += [
        f"# The original differs from its file: {difference.key}: written: {difference.written}; executed: "
        f"{difference.executed}; here: {difference.taken}."
        for difference in ledger.differences
    ]
    return "\n".join(lines) + "\n\n" + OmegaConf.to_yaml(OmegaConf.create(imported.tree))


def report_lines(imported: Imported, *, every_key: bool = True) -> list[str]:
    """The verdicts as text for people, by status."""
    ledger = imported.ledger
    lines = [f"{imported.source}: {_counts(ledger)}"]
    for status in STATUSES if every_key else ("refused",):
        chosen = [verdict for verdict in ledger.verdicts.values() if verdict.status == status]
        lines += [f"{status}:"] if chosen else []
        lines += [_line(verdict) for verdict in chosen]
    if ledger.filled and every_key:
        lines += ["not in the file, written out:"]
        lines += [f"  {ours}: {_short(ledger.settings[ours])} ({why})" for ours, why in ledger.filled.items()]
    if ledger.differences:
        lines += ["where the original did something else than its file says:"]
        lines += [
            f"  {found.key}: written: {found.written}; executed: {found.executed}; taken: {found.taken}"
            for found in ledger.differences
        ]
    if imported.open_problems:
        lines += ["still to be done before it can run:", *(f"  {problem}" for problem in imported.open_problems)]
    return lines


def report_json(imported: Imported) -> str:
    """The verdicts for programs."""
    content = {"source": str(imported.source), "launch_file": imported.launch_file, **imported.ledger.as_json()}
    return json.dumps(content | {"open_problems": imported.open_problems}, indent=2, default=str) + "\n"


def _counts(ledger: Ledger) -> str:
    return ", ".join(f"{number} {status}" for status, number in ledger.counts().items())


def _line(verdict: Verdict) -> str:
    arrow = f" -> {verdict.ours}" if verdict.ours else ""
    note = f" ({verdict.note})" if verdict.note else ""
    return f"  {verdict.key}: {_short(verdict.value)}{arrow}{note}"


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 3:
        return f"[{value[0]}, ... {len(value)} items]"
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
