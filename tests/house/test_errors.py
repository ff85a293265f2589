"""Errors that a user can meet say what to do."""

import ast
import re

ERRORS = {"ConfigError", "DataError", "CheckpointError", "ConversionError", "DamagedCheckpointError"}

# A remedy is an order, or what was expected. Whoever writes another verb adds it here.
REMEDY = re.compile(
    r"\b(expected|add|bring|change|check|choose|convert|copy|correct|count|free|give|go on|install|launch|leave|let"
    r"|list|lower|make|mend|move|name|need|needs|prepare|raise|remove|rename|restore|run|save|say|set|start|take|use"
    r"|wait|write)\b",
    re.IGNORECASE,
)

NO_REMEDY_OF_THEIR_OWN = {
    "any_file.py:load_any_run": "a heading; the problems below it have their remedies",
    "build.py:_downstream": "problems of a file of tasks, each with its remedy",
    "build.py:build_config": "what transformers says of its own fields",
    "checked_files.py:_look_together_at": "the run starts once more, from a checkpoint that it names",
    "checked_files.py:read_whole": "as above",
    "commit.py:parse_manifest": "a reason to pass a checkpoint over; `require_whole` adds what to do",
    "commit.py:read_manifest": "as above",
    "commit.py:verify": "as above",
    "durations.py:parse_duration": "the remedy is worked out: the nearest whole length",
    "saving.py:poll": "another process says it",
    "upload.py:_together": "another machine says it",
    "way.py:find_way": "the sentence of `_what_was_logged`",
}
"""Functions whose errors pass on what somebody else says, and why that is enough."""


def functions(tree: ast.Module) -> dict[ast.AST, str]:
    """Node -> name of the innermost function around it."""
    found: dict[ast.AST, str] = {}
    for outer in ast.walk(tree):  # breadth first, so inner functions come last
        if isinstance(outer, ast.FunctionDef):
            found.update(dict.fromkeys(ast.walk(outer), outer.name))
    return found


def words(node: ast.AST, constants: dict[str, str]) -> str:
    """All text that is written out in an expression, and in constants of the file that it names."""
    parts = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            parts.append(inner.value)
        elif isinstance(inner, ast.Name) and inner.id in constants:
            parts.append(constants[inner.id])
    return " ".join(parts)


def constants_of(tree: ast.Module) -> dict[str, str]:
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def test_errors_say_what_to_do(modules):
    wrong, passed_on = [], set()
    for path, tree in modules.items():
        constants, names = constants_of(tree), functions(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            text = " ".join(words(argument, constants) for argument in node.exc.args)
            if ast.unparse(node.exc.func).rpartition(".")[2] not in ERRORS or not text.strip("\n -;"):
                continue  # no error of ours, or one that is made of others
            where = f"{path.name}:{names.get(node, '')}"
            if REMEDY.search(text):
                continue
            if where in NO_REMEDY_OF_THEIR_OWN:
                passed_on.add(where)
            else:
                wrong.append(f"{path}:{node.lineno} ({where}): {text[:100]}")
    assert not wrong, "say what to do:\n" + "\n".join(wrong)
    assert passed_on == set(NO_REMEDY_OF_THEIR_OWN), "these are gone, or say what to do by now"
