"""The table of tasks: labels of the original OLMo trainer, further ones, and those of one's own files."""

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from olmo_hf.errors import ConfigError
from olmo_hf.evaluation.args import METRICS

HOME = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Task:
    """One label of the table: where its documents lie, how they become questions, and what is measured.

    A task has either `requests`, or `documents` with `context` (or `contexts`), `continuations` (or `choices`) and
    `answer`.
    """

    label: str = ""
    """Name in the metrics."""

    metric: str = "acc"
    """What is measured unless something else is asked for."""

    requests: str = ""
    """Questions written out beforehand: a directory of the task data, or a file of requests beside the YAML file."""

    documents: str = ""
    """Documents: a directory of the task data, or a .jsonl, .jsonl.gz, .json or .parquet file beside the YAML file;
    `{split}` and `{each}` are replaced."""

    split: str = "validation"
    """Put in the place of `{split}`."""

    each: tuple[str, ...] = ()
    """Put in the place of `{each}`, one after another. In a file: a list, or the name of a group."""

    context: str = ""
    """Template of what stands before the continuations."""

    contexts: tuple[str, ...] = ()
    """Instead of `context`: one template per choice, all with the same continuation."""

    continuations: tuple[str, ...] = ()
    """Templates of the continuations."""

    choices: str = ""
    """Instead of `continuations`: an expression that gives their list."""

    answer: str = ""
    """Expression that gives the place of the right continuation, counted from 0."""

    unconditional: str = " "
    """Template of what stands in the place of the context for `pmi_dc`."""

    unconditionals: tuple[str, ...] = ()
    """Instead of `unconditional`: one per choice."""

    separator: str = " "
    """Between context and continuation; belongs to the continuation, but not to its length."""

    instruction: str = ""
    """Template of what stands before the first example, in variants with examples or with 0 of them."""

    examples: str = ""
    """Documents of the examples, like `documents`."""

    shots: tuple[int | None, ...] = (None,)
    """Every question is asked once per entry: null is without instruction, a number is with so many examples."""

    folder: Path | None = None
    """Where files of one's own are looked for: the directory of the YAML file."""


def find_tasks(labels: Iterable[str], own_files: Iterable[str] = ()) -> list[Task]:
    """The tasks of some labels, in their order.

    Args:
        labels: as in the tables.
        own_files: YAML files with tasks of one's own; a label there goes before one of the package.

    Raises:
        ConfigError: labels that do not exist, or files that cannot be used; all problems at once.
    """
    table, problems = _table(own_files)
    found = []
    for label in labels:
        if label in table:
            found.append(table[label])
        else:
            problems.append(f"task {label!r} does not exist; {_suggestion(label, table)}")
    if problems:
        raise ConfigError(problems)
    return found


def all_tasks(own_files: Iterable[str] = ()) -> dict[str, Task]:
    """Every task there is, by label.

    Raises:
        ConfigError: files that cannot be used; all problems at once.
    """
    table, problems = _table(own_files)
    if problems:
        raise ConfigError(problems)
    return table


def _table(own_files: Iterable[str]) -> tuple[dict[str, Task], list[str]]:
    table: dict[str, Task] = dict(shipped_tasks())
    problems: list[str] = []
    for name in own_files:
        try:
            table |= read_task_file(Path(name))
        except ConfigError as error:
            problems += error.problems
    return table, problems


@cache
def shipped_tasks() -> dict[str, Task]:
    """All tasks that come with this package, by label."""
    return original_tasks() | read_task_file(HOME / "more.yaml", own=False)


@cache
def original_tasks() -> dict[str, Task]:
    """The tasks of the original OLMo trainer, by label."""
    return read_task_file(HOME / "original.yaml", own=False)


def read_task_file(path: Path, *, own: bool = True) -> dict[str, Task]:
    """Tasks of a YAML file: label to fields of `Task`, of which `like` takes over those of a prompt or a task.

    Raises:
        ConfigError: a file that cannot be read, and unknown or contradictory fields; all problems at once.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as a file of tasks: {reason}; expected YAML") from error
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"{path}: found no tasks; expected `label: {{documents: ..., context: ..., ...}}`")
    problems: list[str] = []
    entries = {**_prompts(), **(shipped_tasks() if own else {})}
    tasks: dict[str, Task] = {}
    for label, entry in tree.items():
        task = _task(str(label), entry, entries, problems, where=f"{path}: {label}")
        if task is not None:
            tasks[str(label)] = entries[str(label)] = replace(task, folder=path.parent if own else None)
    for label, task in tasks.items():
        problems += [f"{path}: {label}: {problem}" for problem in _contradictions(task)]
    if problems:
        raise ConfigError(problems)
    return tasks


@cache
def _shipped_prompts() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    tree = yaml.safe_load((HOME / "prompts.yaml").read_text(encoding="utf-8"))
    return tree["groups"], tree["prompts"]


@cache
def _prompts() -> dict[str, Task]:
    problems: list[str] = []
    prompts: dict[str, Task] = {}
    for name, entry in _shipped_prompts()[1].items():
        prompt = _task(name, entry, prompts, problems, where=name)
        assert prompt is not None, problems
        prompts[name] = prompt
    return prompts


def _task(label: str, entry: Any, known: Mapping[str, Task], problems: list[str], *, where: str) -> Task | None:
    """One entry of a file as a task; None when it is unusable, which `problems` then says."""
    if not isinstance(entry, dict):
        problems.append(f"{where}: found {_shown(entry)}, expected the fields of a task")
        return None
    given = dict(entry)
    like = given.pop("like", None)
    if like is not None and (not isinstance(like, str) or like not in known):
        problems.append(f"{where}.like: there is no prompt or task {_shown(like)}; {_suggestion(str(like), known)}")
        return None
    base = known[like] if like is not None else Task()
    before = len(problems)
    values: dict[str, Any] = {}
    types = {field.name: field.type for field in fields(Task) if field.name not in ("label", "folder")}
    for name, value in given.items():
        if name not in types:
            problems.append(f"{where}.{name}: there is no such field; {_suggestion(str(name), types)}")
            continue
        try:
            values[name] = _value(name, value)
        except ValueError as error:
            problems.append(f"{where}.{name}: found {_shown(value)}, expected {error}")
    if len(problems) > before:
        return None
    for one, other in (("context", "contexts"), ("continuations", "choices"), ("unconditional", "unconditionals")):
        # What is said here replaces what `like` says in the other form.
        if one in values:
            values.setdefault(other, getattr(Task(), other))
        elif other in values:
            values.setdefault(one, getattr(Task(), one))
    return replace(base, label=label, **values)


def _value(name: str, value: Any) -> Any:
    if name == "each":
        groups = _shipped_prompts()[0]
        if isinstance(value, str):
            if value not in groups:
                raise ValueError(f"a list or one of {', '.join(groups)}")
            return tuple(groups[value])
        return _texts(value)
    if name in ("contexts", "continuations", "unconditionals"):
        return _texts(value)
    if name == "shots":
        listed = value if isinstance(value, list) else [value]
        if not listed or not all(one is None or (type(one) is int and one >= 0) for one in listed):
            raise ValueError("a list of null and numbers of examples")
        return tuple(listed)
    if name == "answer" and type(value) is int:
        return str(value)
    if not isinstance(value, str):
        raise ValueError("text")
    return value


def _shown(value: Any) -> str:
    """A value cut to what a message can hold; anchors of YAML may make one without end of a few lines."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a number too long to write out"


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ValueError("a list of texts (in quotes: yes, no and numbers are no texts in YAML)")
    return tuple(value)


def _contradictions(task: Task) -> list[str]:
    problems = []
    if task.metric not in METRICS:
        problems.append(f"metric is {task.metric!r}; expected one of {', '.join(METRICS)}")
    if bool(task.requests) == bool(task.documents):
        problems.append("give one of `documents` and `requests` (or `like`, to take over those of a task)")
    if task.documents and not task.requests:
        problems += [
            f"{name} is missing; a task with documents needs it"
            for name, is_there in (
                ("context", task.context or task.contexts),
                ("continuations", task.continuations or task.choices),
                ("answer", task.answer),
            )
            if not is_there
        ]
        if task.contexts and len(task.continuations) != 1:
            problems.append("several `contexts` go with exactly one continuation")
        if any(shots is not None and shots > 0 for shots in task.shots) and not task.examples:
            problems.append("`shots` asks for examples; `examples` must name their documents")
    return problems


def _suggestion(word: str, words: Iterable[str]) -> str:
    listed = list(words)
    near = difflib.get_close_matches(word, listed, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return "`olmo-hf evaluate --list-tasks` lists them" if len(listed) > 40 else f"known are {', '.join(listed)}"
