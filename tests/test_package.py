"""The wheel and the source package: what is in them, and that they do without the checkout what docs/start.md says."""

import email
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.house.conftest import ROOT, is_ours

SECTION = (
    (ROOT / "docs" / "start.md").read_text(encoding="utf-8").split("## Without the checkout\n")[1].split("\n## ")[0]
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository alone: what earlier builds left must not get into a package."""
    target = tmp_path_factory.mktemp("tree") / "tree"
    for path in ROOT.rglob("*"):
        if is_ours(path) and path.is_file():
            copy = target / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return target


def build_wheel(source: Path, target: Path) -> Path:
    # Without isolation nothing is fetched to build with.
    words = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(target),
        str(source),
    ]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def source(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source package."""
    target = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(target)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (package,) = target.glob("*.tar.gz")
    return package


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_package_and_the_entry_and_nothing_else(wheel: Path, tree: Path) -> None:
    found = contents(wheel)
    package = [path.relative_to(tree).as_posix() for path in (tree / "olmo_hf").rglob("*") if path.is_file()]
    expected = {name: (tree / name).read_bytes() for name in [*package, "train_hf.py"]}
    assert {name: text for name, text in found.items() if ".dist-info/" not in name} == expected
    assert "olmo_hf/py.typed" in expected
    described = {name.split(".dist-info/")[1]: text.decode() for name, text in found.items() if ".dist-info/" in name}
    assert described["licenses/LICENSE"] == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert described["licenses/NOTICE"] == (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert "olmo-hf = olmo_hf.cli.main:main" in described["entry_points.txt"]
    stated = email.message_from_string(described["METADATA"])
    assert SpecifierSet(stated["Requires-Python"]) == SpecifierSet(">=3.11,<3.12")
    assert "Apache-2.0" in (stated["License-Expression"], stated["License"])  # newer and older setuptools


def test_the_source_package_has_what_a_reader_needs_and_gives_the_same_wheel(
    source: Path, wheel: Path, tree: Path, tmp_path: Path
) -> None:
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    tops = {path.name for path in unpacked.iterdir()}
    assert not tops & {"tests", "benchmarks", "docs", "runs", "data", "build", ".git"}
    for folder in ("configs", "accelerate_configs", "examples", "launch"):
        names = [
            sorted(p.relative_to(at).as_posix() for p in (at / folder).rglob("*") if p.is_file())
            for at in (unpacked, tree)
        ]
        assert names[0] == names[1], folder
    assert {"LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "constraints.txt", "setup.py", "pyproject.toml"} <= tops
    again = build_wheel(unpacked, tmp_path / "again")
    ours, theirs = (
        {name: text for name, text in contents(one).items() if "/RECORD" not in name} for one in (again, wheel)
    )
    assert ours == theirs
    assert source.stat().st_size < 2_000_000


def words_of_the_page() -> list[list[str]]:
    """The commands of the page that come after installing, made small."""
    blocks = re.findall(r"```bash\n(.*?)```", SECTION, re.S)
    lines = [shlex.split(line) for block in blocks for line in block.strip().split("\n")]
    lines = [words for words in lines if words[0] in ("olmo-hf", "accelerate")]
    assert [words[:2] for words in lines] == [
        ["olmo-hf", "prepare-data"],
        ["accelerate", "launch"],
        ["olmo-hf", "report"],
    ]
    lines[0][lines[0].index("--train-tokenizer") + 1] = "600"
    lines[1] += ["--training.max_duration=3", "--training.scheduler.warmup=1", "--data.sequence_length=64"]
    return [["olmo-hf", "--help"], *lines]


def follow_the_page(directory: Path, environment: dict[str, str], home: Path) -> None:
    """Do in an empty directory what docs/start.md says, with packages below `home`."""
    (directory / "my_texts").mkdir(parents=True)
    for page in (ROOT / "docs").glob("*.md"):
        shutil.copyfile(page, directory / "my_texts" / f"{page.stem}.txt")
    (written,) = re.findall(r"```yaml\n(.*?)```", SECTION, re.S)
    (directory / "first.yaml").write_text(written)
    look = "import olmo_hf, train_hf; print(olmo_hf.__file__); print(train_hf.__file__)"
    for words in [["python", "-c", look], *words_of_the_page()]:
        program = shutil.which(words[0], path=environment["PATH"])
        assert program is not None, words[0]
        done = subprocess.run(
            [program, *words[1:]], cwd=directory, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        if words[0] == "python":
            assert all(Path(line).is_relative_to(home) for line in done.stdout.split()), (
                "these are not the installed ones"
            )
    run = directory / "runs" / "first"
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 3
    assert (run / "latest" / "model.safetensors").is_file()
    assert (run / "report.html").stat().st_size > 10_000


def bare_environment(**extra: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1", **extra}


@pytest.mark.takes(26, "five programs, each a process that imports torch, as the page has them one after another")
def test_an_installed_wheel_trains_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """With the packages of this environment, and the wheel before them."""
    site = tmp_path / "site"
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    path = os.pathsep.join([str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    follow_the_page(tmp_path / "empty", bare_environment(PATH=path, PYTHONPATH=str(site)), site)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Where an environment of a gigabyte stands, and does not stay."""
    yield tmp_path / "environment"
    shutil.rmtree(tmp_path / "environment", ignore_errors=True)


def new_environment(home: Path, *wanted: Sequence[str]) -> None:
    """An environment of its own, with what pip fetches: one call for each of `wanted`."""
    venv.create(home, with_pip=True)
    for words in wanted:
        command = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=bare_environment(), check=False)
        if done.returncode and re.search("connection|name resolution|timed out", done.stderr, re.I):
            pytest.skip(f"no package index can be reached to install {words[-1]} from")
        assert done.returncode == 0, done.stderr[-4000:]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.slow
def test_an_empty_environment_gets_everything_it_needs(wheel: Path, home: Path, tmp_path: Path) -> None:
    """Only the wheel, and what pip fetches because the wheel asks for it."""
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    new_environment(home, (*constraints, f"torch=={pinned()['torch']}"), (*constraints, str(wheel)))
    path = os.pathsep.join([str(home / "bin"), "/usr/bin", "/bin"])
    follow_the_page(tmp_path / "empty", bare_environment(PATH=path), home)
    check = [str(home / "bin" / "python"), "-m", "pip", "check"]
    assert subprocess.run(check, check=False, capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def dependencies() -> ModuleType:
    """docs/dependencies.py, which reads setup.py."""
    spec = importlib.util.spec_from_file_location("docs_dependencies", ROOT / "docs" / "dependencies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tested_versions_are_allowed_and_the_page_has_the_ranges_of_today(dependencies: ModuleType) -> None:
    page, tested = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8"), dependencies.tested()
    needed = dependencies.declared("install_requires")
    assert len(needed) >= 19
    for one in needed:
        version = tested[canonicalize_name(one.name)]
        assert one.specifier.contains(version), f"{one} does not allow what is tested, {version}"
        assert any(part.operator == ">=" for part in one.specifier), f"{one.name}: which is the oldest that was tried?"
        assert f"| {one.name} | {one.specifier} | {version} |" in page, "run `python docs/dependencies.py`"


# Of every package that is needed something is used in one of these.
TRIED_WITH_THE_OLDEST = [
    "data/test_memmap.py",
    "data/test_hf_builder.py",
    "data/test_prepare.py",
    "data/test_remote.py",
    "model/test_modeling.py",
    "model/test_saving.py",
    "test_config_file.py",
    "report/test_png.py",
    "test_bad_input.py",
    "callbacks/test_trackers.py",
    "evaluation/icl_metric",
    "callbacks/test_console.py",
    "invariants/test_split.py",
]


@pytest.mark.slow
def test_the_oldest_allowed_versions(dependencies: ModuleType, home: Path, tmp_path: Path) -> None:
    """Every lower bound of setup.py at once."""
    oldest = []
    for one in dependencies.declared("install_requires"):
        (lower,) = [part.version for part in one.specifier if part.operator == ">="]
        oldest.append(f"{one.name}=={lower}")
    tools = [f"{name}=={pinned()[name]}" for name in ("pytest", "hypothesis", "psutil", "zstandard")]
    new_environment(home, (f"torch=={pinned()['torch']}",), (*tools, *oldest))
    # One that hangs is ended with the workers it has, and what they print keeps nobody waiting.
    words = ["timeout", "--kill-after=5", "900", str(home / "bin" / "python"), "-m", "pytest", "-q"]
    words += [f"tests/{name}" for name in TRIED_WITH_THE_OLDEST]
    environment = bare_environment(PYTHONPATH=str(ROOT))
    with open(tmp_path / "log.txt", "w+") as log:
        status = subprocess.run(words, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode
    assert status == 0, (tmp_path / "log.txt").read_text()[-8000:]
