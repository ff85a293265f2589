"""Rules that hold for every line."""

import ast
import re
from pathlib import Path

LONGEST_FILE = 350
LONGEST_FUNCTION = 60
MOST_PARAMETERS = 7
SMALL = 40

RUNS_WHAT_IT_READS = ("pickle", "dill", "cloudpickle", "marshal", "shelve")

# Reads the original's pickles with a list of what they may name; its tests feed it poison.
RESTRICTED_UNPICKLER = Path("olmo_hf/model/conversion/safe_load.py")

TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".cfg", ".sh", "", ".html", ".js", ".css"}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split("\n"))


def calls(tree: ast.Module) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def keyword(call: ast.Call, name: str) -> object:
    for given in call.keywords:
        if given.arg == name and isinstance(given.value, ast.Constant):
            return given.value.value
    return None


def test_nothing_that_is_read_can_run_code(modules):
    wrong = []
    for path, tree in modules.items():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [
                f"{path}:{node.lineno} imports {n}"
                for n in names
                if n in ("pickle", "dill", "cloudpickle", "marshal") and path != RESTRICTED_UNPICKLER
            ]
        for name, call in calls(tree):
            where = f"{path}:{call.lineno} calls {name}"
            if name == "torch.load" and keyword(call, "weights_only") is not True:
                wrong.append(f"{where} without weights_only=True")
            if name in ("np.load", "numpy.load") and keyword(call, "allow_pickle") is True:
                wrong.append(f"{where} with allow_pickle")
            if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen", "eval", "exec"):
                wrong.append(where)
            if keyword(call, "shell") is True or keyword(call, "trust_remote_code") is True:
                wrong.append(where)
    assert not wrong, "\n".join(wrong)


def test_only_commands_print(modules):
    wrong = [
        f"{path}:{call.lineno}"
        for path, tree in modules.items()
        if path.parts[0] == "olmo_hf" and path.parts[1] != "cli"
        for name, call in calls(tree)
        if name == "print" and keyword(call, "file") is None and not any(k.arg == "file" for k in call.keywords)
    ]
    assert not wrong, "use a callback, a logger or print(..., file=...):\n" + "\n".join(wrong)


def test_no_default_by_truth(modules):
    """`x or 1e-4` turns 0.0 into 1e-4."""
    wrong = []
    for path, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
                last = node.values[-1]
                if isinstance(last, ast.Constant) and type(last.value) in (int, float):
                    wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "say `is None`:\n" + "\n".join(wrong)


def test_texts_name_no_place_of_one_machine(files, root):
    places = re.compile(r"(?<![\w.~$}/-])/(?:home|root|work|Users|mnt|scratch)/\w|--(?:extra-)?index-url|/simple/")
    marks = re.compile(r"\b(?:TODO|FIXME|XXX)\b")
    wrong = []
    for path in files:
        if path.suffix not in TEXT or path == Path(__file__) or path.stat().st_size > 2**20:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
            if places.search(line) or marks.search(line):
                wrong.append(f"{path.relative_to(root)}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)


def test_committed_files_are_small(files, root):
    large = [f"{path.relative_to(root)}: {path.stat().st_size:,}" for path in files if path.stat().st_size > 4 * 2**20]
    assert not large, "\n".join(large)


def test_every_module_of_some_size_is_tested(modules, files, root):
    of_tests = [path for path in files if path.is_relative_to(root / "tests") and path.suffix == ".py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in of_tests)
    mirrors = {path.relative_to(root / "tests").as_posix() for path in of_tests}
    missing = []
    for path in modules:
        if path.name in ("__init__.py", "args.py") or lines_of(root / path) < SMALL:
            continue
        inside = path.relative_to("olmo_hf") if path.parts[0] == "olmo_hf" else path
        mirrored = (inside.parent / f"test_{inside.name}").as_posix() in mirrors
        package, name = ".".join(path.parent.parts), path.stem
        imported = re.search(rf"{package}\.{name}\b|from {package} import .*\b{name}\b", text) if package else None
        if not mirrored and not imported and not (path.name == "train_hf.py" and path.name in text):
            missing.append(str(path))
    assert not missing, "no test names these:\n" + "\n".join(missing)


MANY_PARAMETERS = {
    ("memmap.py", "__init__"): "public: its keyword arguments are promised",
    ("modeling_olmo.py", "forward"): "the signature that transformers calls",
    ("build.py", "build_trainer"): "all that a trainer is made of, each by its name",
    ("cancellation.py", "__init__"): "clock, signals and job end come from outside so that tests can set them",
}
"""Functions with more parameters than others, each with its reason."""


def test_sizes_stay_readable(modules, root):
    found = []
    for path, tree in modules.items():
        if lines_of(root / path) > LONGEST_FILE:
            found.append(f"{path} has {lines_of(root / path)} lines; split it below {LONGEST_FILE}")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            where = f"{path}:{node.lineno} {node.name}"
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            parameters = len(node.args.args) + len(node.args.kwonlyargs)
            if length > LONGEST_FUNCTION:
                found.append(f"{where} has {length} lines; keep it below {LONGEST_FUNCTION}")
            # One more for `self`.
            if parameters > MOST_PARAMETERS + 1 and (path.name, node.name) not in MANY_PARAMETERS:
                found.append(f"{where} has {parameters} parameters; make them a dataclass")
    assert not found, "\n".join(found)
