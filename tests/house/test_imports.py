"""Who may import whom: rooms depend on each other in one direction."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Each room, and the rooms it may import besides itself.
MAY_IMPORT: dict[str, set[str]] = {"errors": set(), "when_imported": set(), "allocator": set(), "output": set()}
MAY_IMPORT["distributed"] = MAY_IMPORT["wording"] = {"errors"}
MAY_IMPORT["fault_watch"] = {"errors", "distributed"}
MAY_IMPORT["model"] = MAY_IMPORT["data"] = {"errors", "distributed"}
MAY_IMPORT["training"] = {"errors", "wording", "distributed", "model", "data"}
MAY_IMPORT["evaluation"] = MAY_IMPORT["training"] | {"training"}
MAY_IMPORT["callbacks"] = MAY_IMPORT["evaluation"] | {"evaluation"}
MAY_IMPORT["args"] = MAY_IMPORT["callbacks"] | {"callbacks"}
MAY_IMPORT["settings"] = MAY_IMPORT["args"] | {"args"}
MAY_IMPORT["config_file"] = MAY_IMPORT["settings"] | {"settings"}
MAY_IMPORT["report"] = MAY_IMPORT["config_file"] | {"config_file"}
MAY_IMPORT["recipes"] = MAY_IMPORT["report"] | {"report"}
MAY_IMPORT["replay"] = MAY_IMPORT["config_file"] | {"config_file"}
MAY_IMPORT["launch"] = MAY_IMPORT["recipes"] | {"recipes", "fault_watch", "output"}
MAY_IMPORT["cli"] = MAY_IMPORT["launch"] | {"launch", "report", "replay"}
MAY_IMPORT["train_hf"] = MAY_IMPORT["cli"] | {"allocator"}

# The package itself offers public names of every room, each loaded when it is first used.
EXEMPT = {"__init__"}

# What an args.py may need, and the two rules modules that configuration reads: nothing that takes seconds to import.
LIGHT = {"dataclasses", "typing", "collections", "pathlib", "enum", "re", "math"}


def room_of(path: Path) -> str:
    return path.parts[1].removesuffix(".py") if path.parts[0] == "olmo_hf" else path.stem


def imports_of(tree: ast.Module, path: Path) -> Iterator[str]:
    """Dotted names of all imported modules, at any depth of the file; relative ones written out."""
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_rooms_import_in_one_direction(modules):
    wrong = []
    for path, tree in modules.items():
        room = room_of(path)
        if room in EXEMPT:
            continue
        assert room in MAY_IMPORT, f"{path}: give the new room its place in {Path(__file__).name}"
        for name in imports_of(tree, path):
            parts = name.split(".")
            if parts[0] != "olmo_hf" or len(parts) < 2 or parts[1] == room:
                continue
            is_room = parts[1] in MAY_IMPORT
            if (is_room and parts[1] not in MAY_IMPORT[room]) or not is_room:
                wrong.append(f"{path} imports {name}; {room} may import {sorted(MAY_IMPORT[room])}")
    assert not wrong, "\n".join(wrong)


def test_every_room_that_is_named_exists(root):
    for room in MAY_IMPORT.keys() - {"train_hf"}:
        assert (root / "olmo_hf" / room).is_dir() or (root / "olmo_hf" / f"{room}.py").is_file(), room


def test_args_files_are_light(modules):
    wrong = []
    for path, tree in modules.items():
        if path.name != "args.py":
            continue
        for name in imports_of(tree, path):
            is_args = name.startswith("olmo_hf.") and name.split(".")[-2] in ("args", "errors")
            if not is_args and name.split(".")[0] not in LIGHT:
                wrong.append(f"{path} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_code_that_travels_with_checkpoints_stands_alone(modules):
    """The files are copied beside weights, where only torch and transformers are certain to be there."""
    travels = ["configuration_olmo.py", "training_ops.py", "layers_olmo.py", "modeling_olmo.py"]
    for name in travels:
        path = Path("olmo_hf", "model", name)
        ours = [found for found in imports_of(modules[path], path) if found.startswith("olmo_hf")]
        assert all(found.split(".")[2] + ".py" in travels for found in ours), ours


def test_what_is_imported_is_declared(modules, root):
    """Nothing is used only because something else happens to bring it."""
    declared = (root / "setup.py").read_text(encoding="utf-8").lower().replace("-", "_")
    packages = {"yaml": "pyyaml", "flash_attn": "flash_attn", "olmo_eval": "ai2_olmo_eval", "olmo_hf": "olmo_hf"}
    wrong = set()
    for path, tree in modules.items():
        for name in imports_of(tree, path):
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and f'"{packages.get(top, top)}' not in declared:
                wrong.add(f"{path} imports {top}")
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("name", ["utils.py", "common.py", "misc.py", "helpers.py"])
def test_no_file_is_named_after_nothing(modules, name):
    assert not [path for path in modules if path.name == name]
