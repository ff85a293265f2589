"""`--section.field=value` on the command line, laid over the YAML before anything is typed."""

import dataclasses
import enum
import typing
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

from olmo_hf.args import RunArgs
from olmo_hf.errors import ConfigError
from olmo_hf.settings import declared_elsewhere
from olmo_hf.settings.problems import Problems, shown
from olmo_hf.settings.source import parse_value
from olmo_hf.settings.values import accepts_none, block_type, is_null, members, unknown_key_sentence


@dataclasses.dataclass(frozen=True)
class Override:
    """One setting of the command line."""

    path: tuple[str, ...]
    """Names from the top: `("training", "learning_rate")`."""

    text: str | None
    """What was given; None for a flag without value."""

    negated: bool = False
    """Given as `--no-...`."""

    @property
    def key(self) -> str:
        """The dotted name."""
        return ".".join(self.path)


def split_overrides(arguments: Sequence[str], problems: Problems) -> list[Override]:
    """Words of a command line as overrides.

    Accepts `--a.b=v`, `--a.b v`, `a.b=v`, `--a.b` (a switch) and `--no-a.b`, with `-` for `_` in names.
    """
    overrides = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") and not equals:
            problems.add(word, f"{shown(word)}: expected --section.field=value on the command line")
            continue
        negated = word.startswith("--no-") and not equals
        text = value if equals else None
        if not equals and not negated and words and not words[0].startswith("--"):
            text = words.pop(0)
        dotted = name.removeprefix("no-") if negated else name
        path = tuple(dotted.replace("[", ".").replace("]", "").split("."))
        overrides.append(Override(path, text, negated))
    return overrides


def apply_overrides(tree: dict[str, Any], overrides: Sequence[Override], problems: Problems) -> None:
    """Changes `tree` in place; what does not fit is noted and left out."""
    for written in overrides:
        found = find_field(written.path, problems)
        if found is None:
            continue
        path, declared = found
        override = dataclasses.replace(written, path=path)
        try:
            value = _value(override, declared)
        except ConfigError as error:
            problems.add(override.key, f"--{override.key}: {error.problems[0]}")
            continue
        _place(tree, override, value, problems)


def find_field(path: tuple[str, ...], problems: Problems) -> tuple[tuple[str, ...], Any] | None:
    """The path in the names of the fields, and the type of its last one; None after noting that there is no such."""
    declared: Any = RunArgs
    names: list[str] = []
    for written in path:
        above, name = ".".join(names), written.replace("-", "_")
        if (block := block_type(declared)) is not None:
            hints = typing.get_type_hints(block)
            hints |= declared_elsewhere.field_types(above, name, known=hints)
            if name not in hints:
                problems.add(".".join((*names, name)), f"--{unknown_key_sentence(above, name, list(hints))}")
                return None
            declared = hints[name]
        elif get_origin(declared) is tuple and name.isdecimal():
            declared = get_args(declared)[0]
        elif declared is Any or (inner := _type_inside(declared)) is not None:
            known = declared_elsewhere.field_types(above, name, known={})
            # A name that nobody declares, such as that of a data source, is kept as it is written.
            name = name if name in known else written
            declared = known.get(name, Any if declared is Any else inner)
        else:
            problems.add(".".join((*names, name)), f"--{'.'.join(path)}: `{above}` is a single value, has no `{name}`")
            return None
        names.append(name)
    return tuple(names), declared


def _type_inside(declared: Any) -> Any:
    """The type of the values of a mapping; None for what is no mapping."""
    for member in members(declared):
        if get_origin(member) is dict or member is dict:
            return (get_args(member) or (str, Any))[1]
    return None


def _value(override: Override, declared: Any) -> Any:
    """The plain value that the same words would have in the file."""
    is_switch = bool in members(declared) or (block_type(declared) is not None and accepts_none(declared))
    if override.negated:
        if bool in members(declared):
            return False
        if accepts_none(declared):
            return None
        raise ConfigError("cannot be switched off; give it a value")
    if override.text is None:
        if is_switch:
            return True
        raise ConfigError(f"needs a value: --{override.key}=VALUE")
    if accepts_none(declared) and is_null(override.text):
        return None
    holds_more = any(get_origin(m) in (tuple, list, dict) or m is dict for m in members(declared))
    if _takes_text(declared) and not (holds_more and override.text.lstrip().startswith(("[", "{"))):
        return override.text
    return parse_value(override.text)


def _takes_text(declared: Any) -> bool:
    """Whether the words are taken as they stand: a name such as `1e5` or `no` is not a number or a switch."""
    for member in members(declared):
        if member is str or get_origin(member) is Literal or get_args(member)[:1] == (str,):
            return True
        if isinstance(member, type) and issubclass(member, enum.Enum):
            return True
    return False


def _place(tree: dict[str, Any], override: Override, value: Any, problems: Problems) -> None:
    node: Any = tree
    for depth, name in enumerate(override.path[:-1]):
        inner = node[int(name)] if isinstance(node, list) and int(name) < len(node) else None
        if isinstance(node, dict):
            if node.get(name) is None or isinstance(node[name], bool):
                node[name] = {}  # a setting below a block turns the block on
            inner = node[name]
        if not isinstance(inner, dict | list):
            above = ".".join(override.path[: depth + 1])
            problems.add(override.key, f"--{override.key}: `{above}` is {shown(inner)} in the file; set it as a whole")
            return
        node = inner
    last = override.path[-1]
    if value is True and isinstance(node, dict) and isinstance(node.get(last), dict):
        return  # the block is on already and keeps what the file says
    if isinstance(node, dict):
        node[last] = value
    elif last.isdecimal() and int(last) < len(node):
        node[int(last)] = value
    else:
        problems.add(override.key, f"--{override.key}: the list in the file has {len(node)} items, numbered from 0")
