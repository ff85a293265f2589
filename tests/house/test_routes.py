"""A setting goes from the YAML to where it acts in two hops at most, by the way that the guide shows."""

import ast
import re
from pathlib import Path

import pytest

PAGE = "docs/architecture.md"

# Rooms that read settings without being on their way: checks, plans on paper, other launches, cards and reports.
ASIDE = {"settings", "recipes", "replay", "report", "cli"}


def readers(modules: dict[Path, ast.Module], name: str) -> set[str]:
    """Files in which an attribute of that name is read, from whatever object."""
    found = set()
    for path, tree in modules.items():
        if path.name == "args.py" or (len(path.parts) > 1 and path.parts[1] in ASIDE):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
                found.add(path.as_posix())
    return found


def names_in(tree: ast.Module) -> set[str]:
    """What code reads, hands over by keyword, takes as a parameter or declares as a field: no comments, no texts."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)) | ast.arg(arg=name):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
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


# Where else an attribute of that name is read, and why.
FURTHER = {
    "data.sequence_length": {
        "train_hf.py": "the model gets the number",
        "olmo_hf/launch.py": "the plan gets the number",
        "olmo_hf/data/checks.py": "what is known before a data set is made",
        "olmo_hf/data/hf_builder.py": "the data set of `datasets`, which has its own",
        "olmo_hf/data/mixing.py": "the finished data set is asked",
        "olmo_hf/training/build.py": "the finished data set is asked",
        "olmo_hf/training/learning.py": "the finished data set is asked",
    },
    "training.z_loss_weight": {
        "olmo_hf/training/loss.py": "mathematics that keeps the number from its forward to its backward pass",
        "olmo_hf/training/loss_chunked.py": "as above",
    },
}


def test_nobody_else_reads_a_setting_that_was_walked(routes, modules):
    for setting, files in routes.items():
        name = setting.rpartition(".")[2]
        found = readers(modules, name)
        assert found, setting
        known = set(files) | FURTHER.get(setting, {}).keys()
        assert found <= known, f"{setting} is read elsewhere too; see {PAGE}"
        assert FURTHER.get(setting, {}).keys() <= found, f"{setting} is no longer read there"


def test_every_place_knows_the_setting(routes, modules):
    for setting, files in routes.items():
        name = setting.rpartition(".")[2]
        known_as = {name, name.replace("save_interval_ephemeral", "save_intervals")}  # the plan keeps three as one
        for file in files:
            assert names_in(modules[Path(file)]) & known_as, f"{setting}: {file} knows nothing of it"
        assert any(files[-1] in readers(modules, one) for one in known_as), f"{setting} is not read where it acts"
