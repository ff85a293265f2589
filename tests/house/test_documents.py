"""What the README and the guide say is there, and what is generated is up to date."""

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from olmo_hf.config_file import load_run
from olmo_hf.recipes.plan import plan_run
from olmo_hf.settings.overrides import find_field
from olmo_hf.settings.problems import Problems

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Stands for files of the reader's own.
READERS_OWN = ("my_texts", "corpus.jsonl", "CONFIG.yaml", "first.yaml", "data/", "runs/")


def commands() -> list[tuple[str, str]]:
    """Page and line of every shell command in a fenced block."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S):
            for line in block.strip().split("\n"):
                if line.strip() and not line.startswith("#"):
                    found.append((page.name, line.strip()))
    return sorted(set(found))


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z_-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert words
    assert set(words) <= set(targets)


def check_launch(words: list[str]) -> None:
    assert words[0] == "launch"
    script = words.index(
        "train_hf" if "-m" in words else "train_hf.py"
    )  # the module, of a wheel; the file, of a checkout
    if "--config_file" in words:
        assert (ROOT / words[words.index("--config_file") + 1]).is_file()
    config, *overrides = words[script + 1 :]
    if config not in READERS_OWN:
        load_run(ROOT / config, [word for word in overrides if word not in ("--dry_run", "--dry-run")])


def check_verb(words: list[str]) -> None:
    if words[0] == "COMMAND":
        return
    module = importlib.import_module(f"olmo_hf.cli.{words[0].replace('-', '_')}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    if "--help" not in words:
        _, further = parser.parse_known_args(words[1:])
        settings = all(word.startswith("--") and "=" in word for word in further)
        assert not further or (settings and getattr(module, "TAKES_FURTHER_SETTINGS", False)), further
        if words[0] == "plan" and (ROOT / words[1]).is_file():  # a plan that the guide shows must come out
            given = parser.parse_known_args(words[1:])[0]
            plan_run(load_run(ROOT / words[1], further), num_processes=given.num_processes)


def check_python(words: list[str]) -> None:
    assert words[0].startswith("-") or (ROOT / words[0]).is_file()


def check_script(words: list[str]) -> None:
    """`launch/node.sh` and what SLURM is given: the files must be there."""
    for word in words:
        if word.startswith(("launch/", "accelerate_configs/")):
            assert (ROOT / word).is_file()


def check_lm_eval(words: list[str]) -> None:
    """Tasks of ours are in the folder that is named; those that a command before it writes cannot be looked at."""
    assert {"--model", "--model_args", "--tasks"} <= set(words)
    if "--include_path" in words and (folder := words[words.index("--include_path") + 1]).startswith("examples/"):
        names = {re.findall(r"^task: (\S+)", path.read_text(), re.M)[0] for path in (ROOT / folder).glob("*.yaml")}
        assert set(words[words.index("--tasks") + 1].split(",")) <= names


CHECKS = {
    "launch/node.sh": check_script,
    "sbatch": check_script,
    "make": check_make,
    "accelerate": check_launch,
    "olmo-hf": check_verb,
    "python": check_python,
    "lm_eval": check_lm_eval,
    "source": lambda words: None,
    "pip": lambda words: None,
    "mkdocs": lambda words: None,
}


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_exists(page, line):
    line = re.sub(r"^([A-Z_]+=\S+ )+", "", line)  # variables set for this command alone
    program, *words = shlex.split(re.sub(r'"\$\(.*\)"', "STDLIB", line))
    assert program in CHECKS, f"{page}: how is `{program}` checked?"
    CHECKS[program](words)


def named_in_text() -> list[tuple[str, str]]:
    """Page and command, for every command that stands between backticks in the text or in a table."""
    found = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
        found += [
            (page.name, " ".join(words.split())) for words in re.findall(r"`((?:make|olmo-hf|python) [^`]+)`", text)
        ]
    return sorted(set(found))


@pytest.mark.parametrize(("page", "line"), named_in_text())
def test_every_command_named_in_the_text_exists(page, line):
    """These may be abridged (`[--replicas R]`, `...`), so that only what they name is looked up."""
    program, first, *words = line.split()
    if program == "make":
        check_make([first])
    elif program == "python":
        target = first if first != "-m" else words[0].replace(".", "/") + ".py"
        assert (first == "-m" and words[0] in ("pytest", "pip")) or (ROOT / target).is_file(), target
    elif first not in ("VERB", "commands"):
        parser = argparse.ArgumentParser()
        importlib.import_module(f"olmo_hf.cli.{first.replace('-', '_')}").add_arguments(parser)
        options = {name for action in parser._actions for name in action.option_strings} | {"--debug"}
        named = {re.match(r"--[a-z-]+", word.strip("[]"))[0] for word in words if word.strip("[]").startswith("--")}
        assert named <= options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_on_command_lines_exist(page):
    for name in re.findall(r"--((?:model|data|training|callbacks|evaluation)\.[a-z_.0-9]+)", page.read_text("utf-8")):
        problems = Problems()
        assert find_field(tuple(name.rstrip(".").split(".")), problems), f"{page.name}: {problems.sentences}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for name in re.findall(r"`((?:olmo_hf|tests|configs|accelerate_configs|examples|docs)/[^`*\s]*)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_settings_exist(page):
    # The reference names every field, with [] and NAME for what repeats; it is generated and checked as a whole.
    text = "" if page.name == "configuration.md" else page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:model|data|training|callbacks|evaluation)\.[a-z_.]+)\b(?![/(])", text):
        problems = Problems()
        assert find_field(tuple(name.split(".")), problems), f"{page.name}: {problems.sentences}"


def test_the_two_commands_of_the_readme_are_what_ci_runs():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in script
    assert "```bash\nmake quickstart\nmake test\n```" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_generated_pages_are_up_to_date():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = [page.name for page, text in module.pages().items() if page.read_text(encoding="utf-8") != text]
    assert not stale, "run `make docs`"


def test_constraints_hold_every_package_that_setup_names():
    """A fresh set-up must not choose a version by itself."""
    declared = (ROOT / "setup.py").read_text(encoding="utf-8")
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if line and line[0] != "#"
    )
    names = {name.lower().replace("_", "-") for name in pinned}
    assert all("+" not in version for version in pinned.values()), "a local build is on one machine only"
    required = re.search(r"install_requires=\[(.*?)\]", declared, re.S)
    dev = re.search(r'"dev": \[(.*?)\]', declared, re.S)
    assert required is not None
    assert dev is not None
    for requirement in re.findall(r'"([A-Za-z0-9_.-]+)', required[1] + dev[1]):
        assert requirement.lower().replace("_", "-") in names, f"{requirement} is not in constraints.txt"


def test_files_that_are_not_python_are_packaged(files):
    """What is read at run time must be in the wheel too."""
    declared = (ROOT / "setup.py").read_text(encoding="utf-8")
    found = re.search(r'package_data=\{"olmo_hf": (\[.*?\])\}', declared)
    assert found is not None
    patterns = ast.literal_eval(found[1])
    package = ROOT / "olmo_hf"
    ours = [path.relative_to(package) for path in files if path.is_relative_to(package) and path.suffix != ".py"]
    missing = [str(path) for path in ours if not any(path.match(pattern) for pattern in patterns)]
    assert not missing, f"add these to package_data in setup.py: {missing}"
