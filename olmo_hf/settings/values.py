"""One value of the YAML or of the command line, read as the type its field declares.

Numbers, booleans and null mean the same wherever they stand: `1e-5`, `'1e-5'`, `1_000`, `0o10`, `off` and `null` are
read by the declared type, not by the rules of the file format.
"""

import dataclasses
import enum
import math
import os
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

from olmo_hf.args import RunArgs
from olmo_hf.settings.problems import Problems, nearest, shown

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")
NULL_WORDS = ("null", "~")

LARGEST_WHOLE_NUMBER = 2**63 - 1
"""What 64 bits hold. Whatever computes with a setting takes no more."""

# `010` is eight to some readers of YAML and ten to others: in text it is refused rather than guessed.
_AMBIGUOUS_OCTAL = re.compile(r"[+-]?0[0-9_]+$")


class Mismatch(Exception):
    """A value is not of its type. Carries what was expected and, where there is one, the remedy."""

    def __init__(self, expected: str, remedy: str = ""):
        self.expected = expected
        self.remedy = remedy
        super().__init__(expected)


def read_value(value: Any, declared: Any, key: str, problems: Problems) -> Any:
    """Reads a plain value (what YAML holds) as the declared type; None after noting a problem.

    Args:
        value: text, number, boolean, None, list or mapping.
        declared: a type as a dataclass field declares it.
        key: dotted name of the field, for the message.
        problems: where everything that does not fit is noted.
    """
    try:
        return _read(value, declared, key, problems)
    except Mismatch as mismatch:
        remedy = f"; {mismatch.remedy}" if mismatch.remedy else ""
        problems.add(key, f"{key}: found {shown(value)}, expected {mismatch.expected}{remedy}")
        return None


def read_block(value: Any, declared: type, key: str, problems: Problems) -> Any:
    """Reads a mapping as a dataclass: unknown keys are problems, absent ones keep their defaults.

    `true` and `{}` stand for the block with all its defaults.
    """
    given = {} if value is True else value
    if not isinstance(given, dict):
        raise Mismatch("a block of settings", f"write them below `{key}:`, indented")
    hints = typing.get_type_hints(declared)
    names = [field.name for field in dataclasses.fields(declared)]
    values = {}
    for name, item in given.items():
        inner = f"{key}.{name}" if key else str(name)
        if name not in names:
            problems.add(inner, unknown_key_sentence(key, str(name), names))
        elif item is None and not accepts_none(hints[name]) and dataclasses.is_dataclass(hints[name]):
            continue  # a section written without content keeps its defaults
        else:
            read = read_value(item, hints[name], inner, problems)
            is_block = block_type(hints[name]) is not None  # keeps its default only where it is bad itself
            if inner not in problems.keys and (is_block or not problems.touches([inner])):
                values[name] = read
    return declared(**values)


def unknown_key_sentence(block: str, name: str, names: list[str], *, list_known: bool = True) -> str:
    """What is said about a key that does not exist, with the one that was probably meant.

    Args:
        block: dotted name of the block; empty at the top.
        name: the key found.
        names: keys that exist there.
        list_known: whether all of them are listed when none is near.
    """
    where = f"in `{block}`" if block else "at the top"
    guess = nearest(name.replace("-", "_"), names)
    if guess is None:
        guess = _same_name_elsewhere(name)
    known = f"known there: {', '.join(sorted(names))}" if list_known else "remove it; docs/configuration.md lists all"
    remedy = f"did you mean `{guess}`?" if guess else known
    full = f"{block}.{name}" if block else name
    return f"{full}: unknown key {where}; {remedy}"


def _same_name_elsewhere(name: str) -> str | None:
    """Dotted name of a field called `name` in another block, if there is one."""

    def walk(declared: type, prefix: str) -> str | None:
        for field, hint in typing.get_type_hints(declared).items():
            if field == name:
                return f"{prefix}{field}"
            block = block_type(hint)
            found = walk(block, f"{prefix}{field}.") if block else None
            if found:
                return found
        return None

    return walk(RunArgs, "")


def members(declared: Any) -> tuple[Any, ...]:
    """The alternatives of a union; any other type is its own only alternative."""
    return get_args(declared) if get_origin(declared) in (Union, types.UnionType) else (declared,)


def accepts_none(declared: Any) -> bool:
    """Whether null is a value of this type."""
    return declared is Any or type(None) in members(declared)


def block_type(declared: Any) -> type | None:
    """The dataclass behind a section or an optional block, else None."""
    for member in members(declared):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            return member
    return None


def _read(value: Any, declared: Any, key: str, problems: Problems) -> Any:
    alternatives = members(declared)
    if declared is Any:
        return _plain(value, key, problems)
    if len(alternatives) > 1:
        return _read_union(value, alternatives, key, problems)
    origin = get_origin(declared)
    if origin is Literal:
        return _read_choice(value, get_args(declared))
    if origin in (tuple, list):
        return _read_sequence(value, declared, key, problems)
    if origin is dict or declared is dict:
        if not isinstance(value, dict):
            raise Mismatch("a mapping", "write `name: value` pairs")
        content = (get_args(declared) or (str, Any))[1]
        return {str(name): read_value(item, content, f"{key}.{name}", problems) for name, item in value.items()}
    if dataclasses.is_dataclass(declared) and isinstance(declared, type):
        return read_block(value, declared, key, problems)
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return _read_choice(value, tuple(member.value for member in declared))
    reader = _READERS.get(declared)
    return reader(value) if reader else _plain(value, key, problems)


def _read_union(value: Any, alternatives: tuple[Any, ...], key: str, problems: Problems) -> Any:
    """The first alternative that fits, text last; with one alternative beside None its own message is kept."""
    optional = type(None) in alternatives
    if optional and is_null(value):
        return None
    rest = [member for member in alternatives if member is not type(None)]
    if optional and value is False and block_type(rest[0]):
        return None  # `console: false` reads as "off"
    if any(isinstance(member, type) and issubclass(member, enum.Enum) for member in rest):
        rest = [member for member in rest if member is not str]  # the text is the enumeration's own
    if len(rest) == 1:
        try:
            return _read(value, rest[0], key, problems)
        except Mismatch as mismatch:
            raise Mismatch(f"{mismatch.expected}{' or null' if optional else ''}", mismatch.remedy) from None
    expected, remedies = [], []
    for member in sorted(rest, key=lambda member: member is str):
        try:
            return _read(value, member, key, problems)
        except Mismatch as mismatch:
            expected.append(mismatch.expected)
            remedies.append(mismatch.remedy)
    raise Mismatch(" or ".join([*expected, *(["null"] if optional else [])]), next((r for r in remedies if r), ""))


def _read_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    guess = nearest(value, [c for c in choices if isinstance(c, str)]) if isinstance(value, str) else None
    remedy = f"did you mean {guess!r}?" if guess else "choose one"
    raise Mismatch(f"one of {', '.join(shown(choice) for choice in choices)}", remedy)


def _read_sequence(value: Any, declared: Any, key: str, problems: Problems) -> Any:
    """A list; text alone stands for a list of one, as in `paths: tokens.npy`."""
    kind = get_origin(declared)
    element = (get_args(declared) or (Any,))[0]
    items = [value] if isinstance(value, str) and element is str else value
    if not isinstance(items, list | tuple):
        raise Mismatch("a list", "write one item per line, each after `- `, or [a, b]")
    return kind(read_value(item, element, f"{key}[{place}]", problems) for place, item in enumerate(items))


def _plain(value: Any, key: str, problems: Problems) -> Any:
    """Untyped content of a mapping: text, finite numbers, booleans, null, lists and mappings of these."""
    if isinstance(value, dict):
        return {str(name): _plain(item, f"{key}.{name}", problems) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{place}]", problems) for place, item in enumerate(value)]
    is_large = isinstance(value, int) and abs(value) > LARGEST_WHOLE_NUMBER
    if value is None or isinstance(value, bool | str) or (isinstance(value, int) and not is_large):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise Mismatch("text, a finite number, true, false, null, a list or a mapping", "write one of these")


def is_null(value: Any) -> bool:
    """Whether a value of an optional field means null, also where it comes as text."""
    return value is None or (isinstance(value, str) and value.strip().lower() in NULL_WORDS)


def read_bool(value: Any) -> bool:
    """True or False from a boolean, 1, 0 or the usual words."""
    word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if word in TRUE_WORDS:
        return True
    if word in FALSE_WORDS:
        return False
    raise Mismatch("true or false", "write one of the two")


def read_int(value: Any) -> int:
    """A whole number from a number or text; `5e12` is one, `1.5` and `true` are not."""
    number = _number(value)
    if number is None or (isinstance(number, float) and not number.is_integer()):
        raise Mismatch("a whole number", _number_remedy(value, "write it as 300 or 5e6"))
    if abs(number) > LARGEST_WHOLE_NUMBER:
        raise Mismatch("a whole number of at most 64 bits", "write a smaller one")
    return int(number)


def read_float(value: Any) -> float:
    """A finite number from a number or text."""
    number = _number(value)
    try:
        if number is not None:
            return float(number)
    except OverflowError:
        pass
    raise Mismatch("a finite number", _number_remedy(value, "write it as 0.1 or 1e-5"))


def read_str(value: Any) -> str:
    """Text; a number or a boolean is not guessed into text, because `007` and `no` would change on the way."""
    if isinstance(value, str):
        if "\0" in value:
            raise Mismatch("text without the character NUL", "remove it")
        # The shell replaces it in a word of its own only, and never in a file; a directory named `~` is nobody's wish.
        return os.path.expanduser(value) if value.startswith("~/") else value
    scalar = isinstance(value, bool | int | float)
    remedy = f"put it in quotes: '{shown(value)}'" if scalar else "write a single word or a text in quotes"
    raise Mismatch("text", remedy)


def _number(value: Any) -> int | float | None:
    if isinstance(value, str) and value.isascii() and not _AMBIGUOUS_OCTAL.match(value.strip()):
        for parse in (lambda text: int(text, 0), float):
            try:
                value = parse(value.strip())
                break
            except ValueError:
                continue
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def _number_remedy(value: Any, otherwise: str) -> str:
    octal = isinstance(value, str) and _AMBIGUOUS_OCTAL.match(value.strip())
    return "leave out the leading zero, or write 0o10 for octal" if octal else otherwise


_READERS: dict[Any, Callable[[Any], Any]] = {bool: read_bool, int: read_int, float: read_float, str: read_str}
