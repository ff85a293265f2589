"""Tests that take long say why, and none that `make test` runs takes more than half a minute."""

import importlib.util
from pathlib import Path

from tests.durations import FIRST, LIMIT_SECONDS, ROOT, Durations

MOST_SECONDS = 30


def marks(root: Path) -> list[tuple[float, str, str]]:
    spec = importlib.util.spec_from_file_location("docs_generate", root / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.long_tests())


def test_long_tests_say_why(root: Path) -> None:
    for seconds, name, why in marks(root):
        assert LIMIT_SECONDS < seconds <= MOST_SECONDS, f"{name}: make it shorter, or slow"
        assert len(why.split()) >= 4, f"{name}: say what takes the time"


def test_what_begins_first_exists() -> None:
    assert all((ROOT / name).exists() for name in FIRST)


def test_a_long_test_without_a_reason_is_named() -> None:
    durations = Durations()
    durations.seconds = {"a": 19.0, "b": 21.0, "c": 40.0, "d": 50.0}
    durations.said = {"d"}
    first, *names = durations.unexplained()
    assert "over 20 s" in first
    assert [line.split()[-1] for line in names] == ["c", "b"]
