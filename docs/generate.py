"""Writes what follows from the code: docs/configuration.md, parts of README.md, the list of pages and its site.

python docs/generate.py
"""

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from olmo_hf.args import RunArgs  # noqa: E402
from olmo_hf.evaluation.tasks.table import Task, original_tasks, shipped_tasks  # noqa: E402
from olmo_hf.settings.declared_elsewhere import REPLACED  # noqa: E402
from olmo_hf.settings.values import accepts_none, block_type, members  # noqa: E402

# The pages of the guide in the order in which they are read. A page that is not named here comes last.
GUIDE = {
    "start.md": "from nothing to a model, and what to try next",
    "your-own-data.md": "text to token files",
    "resume-and-faults.md": "kill it, go on, and what the messages mean",
    "many-gpus-and-nodes.md": "from one process to many machines",
    "stages-and-soups.md": "a second stage from the end of the first, and averages of its seeds",
    "scaling-ladder.md": "small runs that foretell large ones",
    "evaluation.md": "perplexity and tasks, in the loop and afterwards",
    "watching-and-stopping.md": "what a run tells, and how it is stopped",
    "spikes-and-the-flight-recorder.md": "what the model saw when the loss jumped",
    "conversion.md": "checkpoints of the original, of Hugging Face and of runs, one into another",
    "original-configs.md": "configuration files of the original as input",
    "coming-from.md": "what was X is now Y: for users of OLMo, of the plain Trainer and of small training loops",
    "faq.md": "questions that people ask, and the answers here",
    "configuration.md": "every setting",
    "parity.md": "how the numbers compare with the original OLMo trainer",
    "architecture.md": "where do I change X?",
    "dependencies.md": "what is needed, which versions were tried, and licences",
    "promises.md": "what is promised, how it was tried, and whether it holds",
}
GUIDE_START, GUIDE_END = "<!-- pages -->", "<!-- end of pages -->"
NAV_START = "nav:  # written by docs/generate.py\n"
PROMISES_START, PROMISES_END = "<!-- promises -->", "<!-- end of promises -->"
TREE_START, TREE_END = "<!-- tree -->", "<!-- end of tree -->"

# What files that cannot speak for themselves are.
FILES = {
    "train_hf.py": None,
    "Makefile": "setup, quickstart, example-two-stage, test, check, slow, audit, torture, bench, promises, docs ...",
    "setup.py": None,
    "MANIFEST.in": "what the source package has beside the package",
    "NOTICE": "whose facts are reproduced here",
    "constraints.txt": "the exact versions that are tested",
    "pyproject.toml": "settings of ruff, mypy and pytest",
    "mkdocs.yml": "the guide as a site",
    ".ci/run": "what a change must pass",
}
FOLDERS = {
    "accelerate_configs": "one file per way to run; each begins with its launch line",
    "launch": "runs on several nodes: restarts, signals, logs; a script for SLURM",
    "configs": "complete runs",
    "examples": "small programs that use the results with stock transformers; two stages and a soup",
    "benchmarks": "what is claimed about speed and memory, to measure again",
    "docs": "the guide",
    "tests": "the same folders as olmo_hf/, and golden, parity, invariants, crash, field, house",
}
CONFIGURATION_HEAD = """# Configuration reference

<!-- Written by docs/generate.py from the docstrings of olmo_hf/*/args.py: change those, then `make docs`. -->

A run is one YAML file with the keys `name`, `model`, `data`, `training`, `callbacks` and `evaluation`. Every value can
also be given on the command line, where `-` may stand for `_`:

```text
--training.learning_rate=3e-4     --training.learning_rate 3e-4
--training.bf16                   --no-training.bf16
--callbacks.console.style=lines   --no-callbacks.console
--data.paths='[a.npy, b.npy]'     --evaluation.evaluators.0.max_instances=64
```

- Numbers, switches and null are read by the type of their field: `1e-5`, `1E-5`, `'1e-5'`, `5e12`, `1_000`, `0o10`,
  `off`, `no` and `null` mean the same in the file and on the command line.
- An optional block is on when it is present (`console: {}` or `console: true`) and off when it is `null` or `false`;
  blocks that are on by default say so. A setting below a block turns the block on.
- `${section.field}` stands for another value that the file gives: `paths: [data/${name}/*.npy]`. Nothing outside the
  file can be reached.
- An unknown key, a value of the wrong type and an impossible combination are refused at start, all of them at once.
- What a run really used is written to `config.yaml` in its directory; starting from that file repeats the run.
"""
TRANSFORMERS_PART = """
## Other fields of `transformers.TrainingArguments`

Stand under `training` beside the fields above and are passed on as they are: for example `ddp_timeout`,
`torch_compile`, `tf32`, `full_determinism`. These are not passed on, because something here says the same:

| field | instead |
|---|---|
"""


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    end = line.find(". ")
    return (line if end < 0 else line[:end]).rstrip(".")


def field_docstrings(declared: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    (body,) = ast.parse(inspect.cleandoc(inspect.getsource(declared))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            found[field.target.id] = " ".join(str(value.value).split()) if isinstance(value, ast.Constant) else ""
    return found


def type_in_words(hint: Any) -> str:
    """A declared type as the page shows it."""
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null", Any: "any"}
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return f"list of {'blocks' if dataclasses.is_dataclass(inner) else type_in_words(inner)}"
    if get_origin(hint) is dict:
        return "named blocks" if dataclasses.is_dataclass(get_args(hint)[1]) else "mapping"
    if len(members(hint)) > 1:
        return " or ".join(type_in_words(member) for member in members(hint))
    return names[hint]


def default_in_words(field: dataclasses.Field[Any]) -> str:
    """A default as it would stand in YAML."""
    value = field.default if field.default is not dataclasses.MISSING else typing.cast(Any, field.default_factory)()
    if isinstance(value, bool) or value is None:
        return f"`{ {True: 'true', False: 'false', None: 'null'}[value] }`"
    if isinstance(value, str):
        return f"`{value}`" if value else "empty"
    if isinstance(value, tuple | dict):
        return "empty" if not value else f"`{value}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def block_lines(key: str, declared: type, doc: str, depth: int) -> Iterator[str]:
    """The section of one block and of the blocks inside it."""
    yield f"\n{'#' * depth} `{key}`\n\n{doc}\n"
    hints, docs = typing.get_type_hints(declared), field_docstrings(declared)
    inner: list[tuple[str, Any, str]] = []
    rows = []
    for field in dataclasses.fields(declared):
        hint, name = hints[field.name], field.name
        block = block_type(hint)
        elements = (
            [arg for arg in get_args(hint) if dataclasses.is_dataclass(arg)] if get_origin(hint) is tuple else []
        )
        if block is not None:
            optional = accepts_none(hint)
            is_on = field.default is not None
            state = f"Optional block, {'on' if is_on else 'off'} by default. " if optional else ""
            own = docs[name] if docs[name] not in ("", "On by default.") else ""
            inner.append((f"{key}.{name}", block, f"{state}{own or inspect.getdoc(block)}"))
            continue
        if key == "training" and name == "transformers":
            continue
        rows.append(f"| `{name}` | {type_in_words(hint)} | {default_in_words(field)} | {docs[name]} |")
        each = f"{key}.{name}.NAME" if get_origin(hint) is dict else f"{key}.{name}[]"
        inner += [(each, element, inspect.getdoc(element) or "") for element in elements]
    if rows:
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        yield from (row.replace(" | None", "") for row in rows)
    for name, block, text in inner:
        if block.__name__ == "DataArgs" and name != "data":
            yield f"\n{'#' * (depth + 1)} `{name}`\n\nThe fields of [`data`](#data), with their own defaults.\n"
        else:
            yield from block_lines(name, block, text, min(depth + 1, 4))


def configuration_page() -> str:
    """The text of docs/configuration.md."""
    lines = [CONFIGURATION_HEAD]
    docs = field_docstrings(RunArgs)
    lines.append(f"\n## `name`\n\n{docs['name']}")
    for name, hint in typing.get_type_hints(RunArgs).items():
        if dataclasses.is_dataclass(hint):
            lines += block_lines(name, typing.cast(type, hint), inspect.getdoc(hint) or "", 2)
    lines.append(TRANSFORMERS_PART.rstrip("\n"))
    lines += [f"| `{name}` | {remedy} |" for name, remedy in REPLACED.items() if name != "transformers"]
    return "\n".join(lines) + "\n"


def tree() -> str:
    """The files of the repository, one line each."""
    rows = [(name, says or module_says(ROOT / name)) for name, says in FILES.items()]
    for folder, says in FOLDERS.items():
        rows.append((f"{folder}/", says))
    package = ROOT / "olmo_hf"
    for path in sorted(package.rglob("*.py"), key=lambda path: (path.parent != package, path.parent, path.name)):
        relative = path.relative_to(ROOT)
        indent = "  " * (len(relative.parts) - 1)
        if path.name == "__init__.py":
            rows.append((f"{'  ' * (len(relative.parts) - 2)}{path.parent.name}/", module_says(path)))
        else:
            rows.append((f"{indent}{path.name}", module_says(path)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {says}".rstrip() for name, says in rows)


def module_says(path: Path) -> str:
    """First sentence of a module's docstring."""
    return first_sentence(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")


def between(text: str, start: str, end: str, new: str) -> str:
    """A text with something new between two marks."""
    before, rest = text.split(start)
    return f"{before}{start}\n{new}\n{end}{rest.split(end)[1]}"


def promises() -> str:
    """What the page of promises came to, in its own words."""
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    (result,) = [line.removeprefix("Result: ") for line in page.splitlines() if line.startswith("Result: ")]
    return textwrap.fill(f"Last time: {result}", 119, break_on_hyphens=False)


def readme() -> str:
    """README.md with the promises and the tree of today."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = between(text, PROMISES_START, PROMISES_END, promises())
    return between(text, TREE_START, TREE_END, f"```text\n{tree()}\n```")


def guide_pages() -> list[tuple[str, str, str]]:
    """File, title and description of every page of the guide that there is."""
    docs = ROOT / "docs"
    there = sorted(path.name for path in docs.glob("*.md") if path.name not in GUIDE and path.name != "index.md")
    names = [name for name in GUIDE if (docs / name).exists() or name == "configuration.md"] + there
    found = []
    for name in names:
        text = CONFIGURATION_HEAD if name == "configuration.md" else (docs / name).read_text(encoding="utf-8")
        found.append((name, text.split("\n", 1)[0].removeprefix("# ").strip(), GUIDE.get(name, "")))
    return found


def index_page() -> str:
    """docs/index.md with the list of pages of today."""
    before, rest = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split(GUIDE_START)
    lines = [f"- [{title}]({name})" + (f": {says}" if says else "") for name, title, says in guide_pages()]
    return f"{before}{GUIDE_START}\n" + "\n".join(lines) + f"\n{GUIDE_END}{rest.split(GUIDE_END)[1]}"


def site() -> str:
    """mkdocs.yml with the pages of today."""
    before = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split(NAV_START)[0]
    rows = [f"  - {json.dumps(title)}: {name}" for name, title, _ in [("index.md", "The guide", ""), *guide_pages()]]
    return before + NAV_START + "\n".join(rows) + "\n"


TASKS_START, TASKS_END = "<!-- tasks -->", "<!-- end of tasks -->"


def task_rows(tasks: dict[str, Task]) -> Iterator[str]:
    """One row per place where documents lie: the labels that read it, each with its metric."""
    by_place: dict[str, list[str]] = {}
    for label, task in tasks.items():
        place = task.requests.split("/")[0] if task.requests else task.documents.split("/{")[0]
        by_place.setdefault(place, []).append(f"`{label}` {task.metric}")
    for place, labels in by_place.items():
        yield f"| {place} | {len(labels)} | {', '.join(labels)} |"


def evaluation_page() -> str:
    """docs/evaluation.md with the tasks of today."""
    page = ROOT / "docs" / "evaluation.md"
    before, rest = page.read_text(encoding="utf-8").split(TASKS_START)
    original = original_tasks()
    more = {label: task for label, task in shipped_tasks().items() if label not in original}
    head = "| data | labels | label and metric |\n|---|---|---|\n"
    lines = [
        f"The {len(original)} labels of the original:\n\n{head}" + "\n".join(task_rows(original)),
        f"And {len(more)} more:\n\n{head}" + "\n".join(task_rows(more)),
    ]
    return f"{before}{TASKS_START}\n" + "\n\n".join(lines) + f"\n{TASKS_END}{rest.split(TASKS_END)[1]}"


LONG_START, LONG_END = "<!-- long -->", "<!-- end of long -->"


def long_tests() -> Iterator[tuple[float, str, str]]:
    """Seconds, name and reason of every test that says that it takes long, the longest first."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for mark in getattr(node, "decorator_list", []):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.takes":
                    seconds, why = (ast.literal_eval(argument) for argument in mark.args)
                    name = f"{path.relative_to(ROOT / 'tests').as_posix()}::{typing.cast(ast.FunctionDef, node).name}"
                    found.append((float(seconds), name, str(why)))
    yield from sorted(found, reverse=True)


def page_of_tests() -> str:
    """tests/README.md with the long tests of today."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    rows = [f"| {seconds:g} | `{name}` | {why} |" for seconds, name, why in long_tests()]
    return between(text, LONG_START, LONG_END, "\n".join(["| seconds | test | why |", "|---|---|---|", *rows]))


def pages() -> dict[Path, str]:
    """Every generated file with the text it must have."""
    return {
        ROOT / "docs" / "configuration.md": configuration_page(),
        ROOT / "docs" / "evaluation.md": evaluation_page(),
        ROOT / "docs" / "index.md": index_page(),
        ROOT / "mkdocs.yml": site(),
        ROOT / "README.md": readme(),
        ROOT / "tests" / "README.md": page_of_tests(),
    }


if __name__ == "__main__":
    for page, content in pages().items():
        page.write_text(content, encoding="utf-8")
        print(page.relative_to(ROOT))
