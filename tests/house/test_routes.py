"""A setting goes from the YAML to where it acts in two hops at most, by the way that the guide shows."""

import ast
import re
from pathlib import Path

import pytest

PAGE = "docs/architecture.md"

# Rooms that read settings without being on their way: checks, plans on paper, other launches, cards and reports.
ASIDE = {"settings", "recipes", "replay", "report", "cli"}


def readers(modules: dict[Path, ast.Module], name: str) -> set[str]:
    """Files in which a field of that name is read from a section: `args.NAME`, `run.data.NAME`."""
    sections = {"args", "self.args", "training", "run.data", "run.training", "given", "section"}
    found = set()
    for path, tree in modules.items():
        if path.name == "args.py" or (len(path.parts) > 1 and path.parts[1] in ASIDE):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == name and ast.unparse(node.value) in sections:
                found.add(path.as_posix())
    return found


@pytest.fixture(scope="module")
def routes(root: Path) -> dict[str, list[str]]:
    """Setting -> the files of its hops and, last, the one where it acts, as the page says."""
    text = (root / PAGE).read_text(encoding="utf-8").partition("## One setting, walked")[2].partition("\n## ")[0]
    rows = [line for line in text.split("\n") if line.startswith("| `")]
    return {re.findall(r"`([\w.]+)`", row)[0]: re.findall(r"`(olmo_hf/[\w/.]+)`", row) for row in rows}


def test_the_page_walks_in_two_hops_at_most(routes):
    assert len(routes) >= 4
    assert all(2 <= len(files) <= 3 for files in routes.values()), "one or two hops, and where it acts"


# Where else `data.sequence_length` is read: as a single value for the plan and the model, and by the checks of data.
FURTHER = {
    "data.sequence_length": {"train_hf.py", "olmo_hf/launch.py", "olmo_hf/data/checks.py"},
}


def test_nobody_else_reads_a_setting_that_was_walked(routes, modules):
    for setting, files in routes.items():
        name = setting.rpartition(".")[2]
        found = readers(modules, name)
        assert found, setting
        assert found <= set(files) | FURTHER.get(setting, set()), f"{setting} is read elsewhere too; see {PAGE}"


def test_every_place_knows_the_setting(routes, modules):
    for setting, files in routes.items():
        name = setting.rpartition(".")[2]
        known_as = {name, name.replace("save_interval_ephemeral", "save_intervals")}  # the plan keeps three as one
        for file in files:
            text = ast.unparse(modules[Path(file)])
            assert any(word in text for word in known_as), f"{setting}: {file} knows nothing of it"
