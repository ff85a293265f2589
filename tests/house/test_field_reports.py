"""Every test that the table of reported faults names is there, and every row names one."""

import ast
import re

import pytest

TABLE = "tests/field/README.md"


@pytest.fixture(scope="module")
def rows(root) -> dict[str, list[str]]:
    """Entry -> the tests in its row."""
    found = {}
    for line in (root / TABLE).read_text(encoding="utf-8").split("\n"):
        if entry := re.match(r"\| ([A-Z]+-\d\d) \|", line):
            assert entry[1] not in found, f"{entry[1]} stands twice in {TABLE}"
            found[entry[1]] = re.findall(r"`([\w/.]+::\w+)`", line)
    return found


def test_every_named_test_exists(rows, root):
    assert len(rows) > 60
    missing = []
    for entry, names in rows.items():
        assert names, f"{entry} names no test"
        for name in names:
            file, _, function = name.partition("::")
            path = root / "tests" / file
            tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
            if function not in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]:
                missing.append(f"{entry}: {name}")
    assert not missing, f"{TABLE} names tests that are not there:\n" + "\n".join(missing)


def test_every_test_of_the_folder_has_a_row(rows, root):
    named = {name for names in rows.values() for name in names}
    for path in sorted((root / "tests" / "field").glob("test_*.py")):
        tests = [
            node.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        without = [name for name in tests if f"field/{path.name}::{name}" not in named]
        assert not without, f"{path.name}: {without} in no row of {TABLE}"
