"""A configuration file of the original OLMo trainer: its text, the command line laid over it, and its `${...}`.

Nothing here knows what the keys mean. `${section.key}` and the resolvers of the original are replaced: `oc.env` (reads
the environment), `oc.decode` (reads a text as YAML), `oc.select` (a key of the file, or a default), `path.choose` (the
first path that exists, any URL counts as existing), `path.glob`, and `path.last_checkpoint` (local folders). What
cannot be replaced is told with its key, and the key is left out.
"""

import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_hf.errors import ConfigError
from olmo_hf.settings.source import parse_value, read_yaml

MARKS = ("run_name", "global_train_batch_size", "device_train_microbatch_size", "save_folder")
"""Keys at the top of the original's files that ours never have."""

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_STEP = re.compile(r"step(\d+)(-unsharded)?")
MAX_REPLACEMENTS = 1000
MAX_CHARACTERS = 2**16


@dataclass
class OriginalFile:
    """What a file of the original says once every `${...}` is replaced.

    Attributes:
        tree: The settings.
        unresolved: Dotted key to the reason why its `${...}` could not be replaced; these are not in `tree`.
        replaced: Dotted key to what it said before.
    """

    tree: dict[str, Any]
    unresolved: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)


def is_original(tree: Mapping[str, Any]) -> bool:
    """Whether a file's top-level keys are those of the original trainer."""
    return sum(key in tree for key in MARKS) >= 2 or ("run_name" in tree and "name" not in tree)


def read_original(path: Path, overrides: Sequence[str] = ()) -> OriginalFile:
    """Reads a file of the original.

    Args:
        path: The YAML file.
        overrides: Words in the original's style: `--a.b=value`, or `--a.b` for true; `-` in names means `_`.

    Raises:
        ConfigError: The file cannot be read, or a word of the command line is no setting.
    """
    tree = read_yaml(path)
    for word in overrides:
        _override(tree, word)
    found = OriginalFile(tree={})
    found.tree = _Resolver(tree, found).walk(tree, "")
    return found


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names of all single values; lists of plain values and empty mappings are single values too."""
    if isinstance(tree, dict) and tree:
        pairs = [(f"{prefix}.{name}" if prefix else str(name), item) for name, item in tree.items()]
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        pairs = [(f"{prefix}[{place}]", item) for place, item in enumerate(tree)]
    else:
        return {prefix: tree}
    return {key: value for name, item in pairs for key, value in flatten(item, name).items()}


def _override(tree: dict[str, Any], word: str) -> None:
    name, equals, text = word.lstrip("-").partition("=")
    names = name.replace("-", "_").split(".")
    if not all(names):
        raise ConfigError(f"{word!r}: expected --section.key=value in the style of the original")
    node = tree
    for part in names[:-1]:
        inner = node.get(part)
        if inner is None:
            inner = node[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--{name}: {part!r} is a single value in the file, so nothing can be set below it")
        node = inner
    node[names[-1]] = parse_value(text) if equals else True


class Unresolved(Exception):
    """A `${...}` cannot be replaced. Carries the reason."""


class _Resolver:
    """Replaces `${...}` from the inside out, each key once."""

    def __init__(self, tree: dict[str, Any], found: OriginalFile):
        self.tree, self.found = tree, found

    def walk(self, node: Any, key: str) -> Any:
        """The node with its values replaced and the unresolved ones left out."""
        if isinstance(node, dict):
            pairs = {str(name): self.walk(item, f"{key}.{name}" if key else str(name)) for name, item in node.items()}
            return {name: item for name, item in pairs.items() if not isinstance(item, Unresolved)}
        if isinstance(node, list):
            items = [self.walk(item, f"{key}[{place}]") for place, item in enumerate(node)]
            return [item for item in items if not isinstance(item, Unresolved)]
        if not isinstance(node, str) or "${" not in node:
            return node
        try:
            value = self._replace(node, (key,))
        except Unresolved as reason:
            self.found.unresolved[key] = str(reason)
            return reason
        self.found.replaced[key] = node
        return value

    def _replace(self, text: str, active: tuple[str, ...]) -> Any:
        for _ in range(MAX_REPLACEMENTS):
            match = _INNERMOST.search(text)
            if match is None:
                return text
            value = self._one(match.group(1).strip(), active)
            if match.group(0) == text.strip():
                return value
            if isinstance(value, dict | list):
                raise Unresolved(f"{match.group(0)} is no single value, and cannot be part of a text")
            text = text[: match.start()] + _as_text(value) + text[match.end() :]
            if len(text) > MAX_CHARACTERS:
                raise Unresolved("it grows without end")
        raise Unresolved("it grows without end")

    def _one(self, inner: str, active: tuple[str, ...]) -> Any:
        name, colon, arguments = inner.partition(":")
        if not colon:
            return self._key(inner, active)
        parts = [part.strip() for part in arguments.split(",")]
        if name == "oc.select":
            return self._select(parts, active)
        if name not in RESOLVERS:
            raise Unresolved(f"${{{name}:...}} is no resolver of the original ({', '.join(RESOLVERS)}, oc.select)")
        return RESOLVERS[name](parts)

    def _select(self, parts: list[str], active: tuple[str, ...]) -> Any:
        key, *default = parts
        try:
            return self._key(key, active)
        except Unresolved:
            if not default:
                return None
            return parse_value(default[0])

    def _key(self, inner: str, active: tuple[str, ...]) -> Any:
        """The value of `a.b`, `a[b]` or `a[0]`."""
        if inner in active:
            raise Unresolved(f"${{{inner}}} leads back to itself")
        node: Any = self.tree
        for part in inner.replace("]", "").replace("[", ".").split("."):
            if isinstance(node, list) and part.isdecimal() and int(part) < len(node):
                node = node[int(part)]
            elif isinstance(node, dict) and part in node:
                node = node[part]
            else:
                raise Unresolved(f"${{{inner}}} names no key of the file")
        return self._replace(node, (*active, inner)) if isinstance(node, str) and "${" in node else node


def _as_text(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if not isinstance(value, str) else value


SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables that no configuration may read."""


def _environment(arguments: list[str]) -> str:
    name, *default = arguments
    if SECRET.search(name):  # what is read is written into the run's settings, where anybody may see it
        raise Unresolved(f"the environment variable {name} looks like a secret and is not read")
    if name in os.environ:
        return os.environ[name]
    if default:
        return default[0]
    raise Unresolved(f"the environment variable {name} is not set")


def _choose(arguments: list[str]) -> str:
    for path in arguments:
        if "://" in path or Path(path).exists():
            return path
    raise Unresolved(f"none of {', '.join(arguments)} exists")


def _glob(arguments: list[str]) -> list[str]:
    matches = sorted(match for pattern in arguments for match in glob.glob(pattern))
    if not matches:
        raise Unresolved(f"{', '.join(arguments)} matches no file")
    return matches


def _last_checkpoint(arguments: list[str]) -> str:
    folder = arguments[0]
    if "://" in folder:
        raise Unresolved(f"{folder} is not on this machine; name the checkpoint itself")
    found = []
    for path in Path(folder).glob("step*"):
        match = _STEP.fullmatch(path.name)
        if match is not None:
            found.append((int(match.group(1)), match.group(2) is None, str(path)))
    if not found:
        raise Unresolved(f"{folder} holds no checkpoint")
    return max(found)[2]  # the highest step; of equals the sharded one


def _decode(arguments: list[str]) -> Any:
    return parse_value(",".join(arguments))


RESOLVERS: dict[str, Callable[[list[str]], Any]] = {
    "oc.env": _environment,
    "oc.decode": _decode,
    "path.choose": _choose,
    "path.glob": _glob,
    "path.last_checkpoint": _last_checkpoint,
}
