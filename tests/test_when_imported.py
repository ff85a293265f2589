"""`import olmo_hf` costs next to nothing and still registers everything, whoever is imported first."""

import subprocess
import sys
from importlib import import_module, reload
from importlib.util import find_spec

import pytest

from olmo_hf.when_imported import when_imported


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose modules import each other, and the list of what was complete at each call of the action."""
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("value = 3\n")
    (folder / "outer.py").write_text("from watched import inner\nvalue = inner.value + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "watched"]:
        del sys.modules[name]


def complete() -> list[str]:
    return sorted(n for n, m in sys.modules.items() if n.startswith("watched.") and hasattr(m, "value"))


def test_the_action_is_called_at_the_end_of_whole_imports_until_it_is_done(package):
    seen: list[list[str]] = []
    before = list(sys.meta_path)
    when_imported("watched", lambda: seen.append(complete()) or len(seen) == 2)
    assert seen == []
    import_module("watched.outer")
    # Not when `inner` ended, in the middle of `outer`.
    assert seen == [[], ["watched.inner", "watched.outer"]]
    assert sys.meta_path == before
    assert type(sys.modules["watched.outer"].__spec__.loader).__name__ == "SourceFileLoader"
    reload(sys.modules["watched.inner"])
    assert len(seen) == 2


def test_a_package_that_is_there_is_acted_on_at_once(package):
    import_module("watched.outer")
    seen: list[list[str]] = []
    when_imported("watched", lambda: bool(seen.append(complete()) or True))
    assert seen == [["watched.inner", "watched.outer"]]


def test_the_action_may_import_more_and_is_not_called_for_it(package):
    calls = []

    def action() -> bool:
        calls.append(1)
        import_module("watched.outer")
        return False

    when_imported("watched", action)
    import_module("watched")
    assert calls == [1]


def test_looking_a_module_up_is_not_importing_it(package):
    calls: list[int] = []
    when_imported("watched", lambda: bool(calls.append(1)))
    import_module("watched")
    assert find_spec("watched.inner") is not None
    assert calls == [1]
    import_module("watched.inner")
    assert calls == [1, 1]


def test_a_module_that_does_not_exist_is_missing_as_ever(package):
    when_imported("no_such_package", lambda: True)
    with pytest.raises(ModuleNotFoundError):
        import_module("no_such_package")


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, olmo_hf; print([n for n in ('torch', 'transformers', 'datasets', 'numpy') if n in sys.modules])"
    )
    assert run(code) == "[]"


# Modules of transformers that import the Auto classes in the middle of their own import, or the other way round.
FIRST = [
    "import transformers",
    "import transformers.generation.utils",
    "import transformers.modeling_utils",
    "from transformers import Trainer",
    "from transformers import pipeline",
    "from transformers import AutoModelForCausalLM",
    "from transformers import Olmo2ForCausalLM",
    "import datasets",
    "import lm_eval",
    "import olmo_hf.model.modeling_olmo",
    "import olmo_hf.data.hf_builder",
]


FAST = [FIRST[-2]]


@pytest.mark.parametrize(
    "first", [*FAST, *(pytest.param(first, marks=pytest.mark.slow) for first in FIRST if first not in FAST)]
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_everything_is_registered_whoever_is_imported_first(first, order):
    steps = ["import olmo_hf", first] if order == "before" else [first, "import olmo_hf"]
    steps += [
        "from transformers import AutoConfig, AutoModelForCausalLM",
        "config = AutoConfig.for_model('olmo_hf')",
        "print(type(config).__name__, AutoModelForCausalLM._model_mapping[type(config)].__name__)",
        "import datasets",
        "from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as known",
        "print(known['olmo_memmap'][0])",
    ]
    assert run("\n".join(steps)) == "OlmoHfConfig OlmoHfForCausalLM\nolmo_hf.data.hf_builder"
