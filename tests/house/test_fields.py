"""Every setting says what it means and turns something."""

import ast
import dataclasses
import importlib
import importlib.util
import typing

import pytest

ARGS = ["model", "data", "training", "callbacks", "evaluation"]

# Where a field is only checked or copied; reading it there turns nothing.
ONLY_LOOKED_AT = ("settings", "config_file.py")


def dataclasses_of(room: str) -> list[type]:
    module = importlib.import_module(f"olmo_hf.{room}.args")
    return [
        found
        for found in vars(module).values()
        if isinstance(found, type) and dataclasses.is_dataclass(found) and found.__module__ == module.__name__
    ]


@pytest.fixture(scope="module")
def field_docstrings(root):
    spec = importlib.util.spec_from_file_location("docs_generate", root / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.field_docstrings


@pytest.mark.parametrize("room", ARGS)
def test_every_field_is_explained(room, field_docstrings):
    for declared in dataclasses_of(room):
        assert declared.__doc__, declared
        for name, doc in field_docstrings(declared).items():
            assert doc.endswith("."), f"olmo_hf/{room}/args.py: {declared.__name__}.{name} has no docstring"


@pytest.mark.parametrize("room", ARGS)
def test_sections_are_frozen_and_every_field_has_a_default(room):
    for declared in dataclasses_of(room):
        assert declared.__dataclass_params__.frozen, declared
        assert declared() == declared(), declared
        assert typing.get_type_hints(declared), declared


def test_every_field_is_read_where_something_is_done(modules):
    from transformers import TrainingArguments

    # olmo_hf/training/arguments.py hands these over under their own name, and transformers acts on them.
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    read = set()
    for path, tree in modules.items():
        if path.name == "args.py" or any(part in ONLY_LOOKED_AT for part in path.parts):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    unread = [
        f"{room}: {declared.__name__}.{field.name}"
        for room in ARGS
        for declared in dataclasses_of(room)
        for field in dataclasses.fields(declared)
        if field.name not in read and not (room == "training" and field.name in theirs)
    ]
    assert not unread, "settings that turn nothing:\n" + "\n".join(unread)
