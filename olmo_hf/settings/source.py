"""Reads the YAML file and resolves `${...}`; everything here works on plain dicts, lists and scalars.

A configuration may come from a stranger. Tags run nothing, `${...}` reaches other keys of the same file and nothing
else (no environment, no files), and neither repeated anchors nor repeated references can grow it beyond a limit.
"""

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from olmo_hf.errors import ConfigError
from olmo_hf.settings.problems import Problems, nearest, shown

MAX_FILE_BYTES = 4 * 2**20
MAX_NODES = 100_000
"""Most values in a file once its anchors are written out."""
MAX_SIZE = 4 * 2**20
"""Most values and characters once `${...}` is written out."""

_REFERENCE = re.compile(r"\$\{\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*\}")
_MISSING = "???"  # OmegaConf's word for a value that must still be given


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, references unresolved.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or is not a mapping.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{path}: has more than {MAX_FILE_BYTES} bytes; give a YAML file with the settings of a run"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text at byte {error.start}; give a YAML file") from error
    return parse_mapping(text, str(path))


def parse_mapping(text: str, where: str) -> dict[str, Any]:
    """The mapping that YAML text holds; an empty text is an empty mapping.

    Raises:
        ConfigError: not YAML, not a mapping, or grown by anchors beyond the limits; names `where`.
    """
    try:
        created = OmegaConf.create(text, max_yaml_expanded_nodes=MAX_NODES)
        tree = OmegaConf.to_container(created, resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        first = " ".join(str(error).split())
        raise ConfigError(
            f"{where}: not readable as YAML: {first or 'nested too deep'}; mend the file there"
        ) from error
    except AssertionError:  # OmegaConf's answer to a file that is a single number or boolean
        tree = text
    if not isinstance(tree, dict) or (tree and text.strip() in tree):
        raise ConfigError(f"{where}: expected sections (`name:`, `model:`, `data:`, ...), found {shown(tree)}")
    return {str(name): value for name, value in tree.items()}


def parse_value(text: str) -> Any:
    """A value on the command line, read as YAML reads it in a file.

    Raises:
        ConfigError: not YAML.
    """
    value = parse_mapping(f"value: {text}", "the value")
    return value["value"] if list(value) == ["value"] else value


def resolve(tree: dict[str, Any], problems: Problems) -> dict[str, Any]:
    """The tree with every `${section.field}` replaced by what it names.

    Other forms of `${...}` (environment, resolvers, relative paths) are problems, and so are references that lead
    nowhere or in a circle, and values that were left as `???`.
    """
    before = len(problems.sentences)
    _Measure(tree, problems).walk(tree, "", ())
    if len(problems.sentences) > before:
        return _without_references(tree)
    resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    assert isinstance(resolved, dict)
    _refuse_leftovers(resolved, "", problems)
    return {str(name): value for name, value in resolved.items()}


class _Measure:
    """Finds bad references and the size of the resolved tree without building it."""

    def __init__(self, tree: dict[str, Any], problems: Problems):
        self.tree = tree
        self.problems = problems
        self.known: dict[str, int] = {}

    def walk(self, node: Any, key: str, active: tuple[str, ...]) -> int:
        """Nodes and characters below `node` once resolved. `active` are the references being followed."""
        if isinstance(node, dict):
            inner = [(f"{key}.{name}" if key else str(name), item) for name, item in node.items()]
        elif isinstance(node, list):
            inner = [(f"{key}[{place}]", item) for place, item in enumerate(node)]
        else:
            return self._text(node, key, active) if isinstance(node, str) else 1
        size = 1 + sum(self.walk(item, name, active) for name, item in inner)
        return self._bounded(size, key)

    def _text(self, text: str, key: str, active: tuple[str, ...]) -> int:
        if text == _MISSING:
            self.problems.add(key, f"{key}: still `{_MISSING}`; give it a value in the file or as --{key}=VALUE")
        if "${" in _REFERENCE.sub("", text):
            self.problems.add(
                key, f"{key}: found {shown(text)}, but only `${{section.field}}` is replaced; write the value itself"
            )
            return len(text)
        return self._bounded(len(text) + sum(self._follow(r, key, active) for r in _REFERENCE.findall(text)), key)

    def _follow(self, reference: str, key: str, active: tuple[str, ...]) -> int:
        if reference in active:
            self.problems.add(key, f"{key}: `${{{reference}}}` leads back to itself; write one of the values out")
            return 0
        if reference not in self.known:
            node: Any = self.tree
            for part in reference.split("."):
                if isinstance(node, dict) and part not in node:
                    guess = nearest(part, map(str, node))
                    remedy = f"did you mean `{guess}`?" if guess else "name a key that the file gives, in full"
                    self.problems.add(key, f"{key}: `${{{reference}}}` names no key of this file; {remedy}")
                    return 0
                if not isinstance(node, dict):
                    self.problems.add(key, f"{key}: `${{{reference}}}` goes through {shown(node)}; name a plain key")
                    return 0
                node = node[part]
            self.known[reference] = self.walk(node, reference, (*active, reference))
        return self.known[reference]

    def _bounded(self, size: int, key: str) -> int:
        if size > MAX_SIZE:
            self.problems.add(key, f"{key}: grows beyond {MAX_SIZE} characters through `${{...}}`; write it shorter")
        return min(size, MAX_SIZE + 1)


def _without_references(tree: Any) -> Any:
    """The tree without the values that could not be resolved, so that the rest is still checked."""
    if isinstance(tree, dict):
        return {n: _without_references(v) for n, v in tree.items() if not (isinstance(v, str) and _unresolved(v))}
    if isinstance(tree, list):
        return [_without_references(item) for item in tree if not (isinstance(item, str) and _unresolved(item))]
    return tree


def _unresolved(text: str) -> bool:
    return "${" in text or text == _MISSING


def _refuse_leftovers(node: Any, key: str, problems: Problems) -> None:
    """Two values that only together spell `${` would not survive being written and read again."""
    if isinstance(node, dict):
        for name, item in node.items():
            _refuse_leftovers(item, f"{key}.{name}" if key else str(name), problems)
    elif isinstance(node, list):
        for place, item in enumerate(node):
            _refuse_leftovers(item, f"{key}[{place}]", problems)
    elif isinstance(node, str) and _unresolved(node):
        problems.add(key, f"{key}: is {shown(node)} after replacing; write the value itself")
