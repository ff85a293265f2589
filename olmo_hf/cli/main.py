"""`olmo-hf VERB ...`: finds the verbs beside this file and imports only the one that was asked for.

A verb is a module of this folder with `HELP` (one line of plain text), `add_arguments(parser)` and
`run(namespace) -> int` (the exit status). It imports heavy packages inside `run`, so that help is instant. One that
says `TAKES_FURTHER_SETTINGS = True` gets words of the form `--section.key=value` as `namespace.further`.
"""

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from olmo_hf.errors import OlmoHfError
from olmo_hf.settings.problems import nearest

_HOME = Path(__file__).parent
USER_ERROR = 2
"""Exit status of errors that the user can mend, and of a wrong command line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Args:
        arguments: words after `olmo-hf`; None takes those of the process.

    Returns:
        The exit status: 0, what the verb returned, or 2 for an error that the user can mend (told on stderr).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    show_traceback = "--debug" in words
    words = [word for word in words if word != "--debug"]
    verbs = {path.stem.replace("_", "-"): path for path in sorted(_HOME.glob("[a-z]*.py")) if path.stem != "main"}
    if words and words[0] not in (*verbs, "-h", "--help"):
        guess = nearest(words[0], verbs)
        remedy = f"did you mean `{guess}`?" if guess else "`olmo-hf --help` lists the commands"
        print(f"olmo-hf: there is no command `{words[0]}`; {remedy}", file=sys.stderr)
        return USER_ERROR
    try:
        status = _run_verb(words[0], verbs[words[0]].stem, words[1:]) if words and words[0] in verbs else None
        if status is None:
            print(_overview(verbs))
            status = 0 if words else USER_ERROR
        sys.stdout.flush()  # while somebody notices that nobody reads it
        return status
    except OlmoHfError as error:
        if show_traceback:
            raise
        print(f"olmo-hf {words[0]}: {error}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # the reader of our output (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def help_line(path: Path) -> str:
    """`HELP` of a verb, read from its source without running it."""
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "HELP" for t in statement.targets
        ):
            return str(ast.literal_eval(statement.value))
    raise AssertionError(f"{path.name} defines no HELP")


def _run_verb(verb: str, module_name: str, words: list[str]) -> int:
    module = importlib.import_module(f"olmo_hf.cli.{module_name}")
    parser = argparse.ArgumentParser(prog=f"olmo-hf {verb}", description=module.HELP)
    module.add_arguments(parser)
    namespace, further = parser.parse_known_args(words)
    if further and not getattr(module, "TAKES_FURTHER_SETTINGS", False):
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    namespace.further = further
    return int(module.run(namespace))


def _overview(verbs: dict[str, Path]) -> str:
    width = max((len(verb) for verb in verbs), default=0)
    lines = [f"  {verb:<{width}}  {help_line(path)}" for verb, path in verbs.items()]
    return "\n".join(
        [
            "usage: olmo-hf COMMAND [...]",
            "",
            "Commands:",
            *lines,
            "",
            "`olmo-hf COMMAND --help` says more about one; `--debug` shows where an error arose.",
            "Training itself is started with `accelerate launch train_hf.py CONFIG.yaml`; where only the wheel is",
            "installed, with `accelerate launch -m train_hf CONFIG.yaml`.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
