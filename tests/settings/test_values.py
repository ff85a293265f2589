"""Reading one value as its declared type."""

import enum
import math
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from olmo_hf.data.args import DataArgs, InstanceFilterArgs
from olmo_hf.settings.problems import Problems, nearest, shown
from olmo_hf.settings.values import read_value


class Shade(enum.Enum):
    DARK = "dark"


def read(value: Any, declared: Any) -> tuple[Any, list[str]]:
    problems = Problems()
    return read_value(value, declared, "a.b", problems), problems.sentences


@pytest.mark.parametrize(
    ("value", "declared", "expected"),
    [
        ("1e-5", float, 1e-5),
        (3, float, 3.0),
        (5e12, int, 5_000_000_000_000),
        ("0b11", int, 3),
        ("-1_0", int, -10),
        (1, bool, True),
        ("OFF", bool, False),
        ("null", int | None, None),
        ("~", str | None, None),
        ("5", int | str, 5),
        ("5x", int | str, "5x"),
        (1.5, int | float, 1.5),
        ("dark", Shade | str, "dark"),
        ("b", Literal["a", "b"] | None, "b"),
        (["1", 2], tuple[int, ...], (1, 2)),
        ([["a"]], list[list[str]], [["a"]]),
        ({"x": [1, None, {"y": True}]}, dict[str, Any], {"x": [1, None, {"y": True}]}),
        (False, InstanceFilterArgs | None, None),
        (True, InstanceFilterArgs | None, InstanceFilterArgs()),
        ({"repetition_max_count": "9"}, InstanceFilterArgs | None, InstanceFilterArgs(repetition_max_count=9)),
    ],
)
def test_what_fits_is_read(value, declared, expected):
    result, sentences = read(value, declared)
    assert not sentences
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "declared", "sentence"),
    [
        (True, int, "a.b: found true, expected a whole number; write it as 300 or 5e6"),
        ("010", int, "a.b: found '010', expected a whole number; leave out the leading zero, or write 0o10 for octal"),
        (float("inf"), float, "a.b: found inf, expected a finite number; write it as 0.1 or 1e-5"),
        ("nan", float, "a.b: found 'nan', expected a finite number; write it as 0.1 or 1e-5"),
        (10**400, float, "a.b: found " + "1" + "0" * 56 + "..., expected a finite number; write it as 0.1 or 1e-5"),
        ("२", int, "a.b: found '२', expected a whole number; write it as 300 or 5e6"),
        ([], bool, "a.b: found [], expected true or false; write one of the two"),
        (None, str, "a.b: found null, expected text; write a single word or a text in quotes"),
        (2, bool, "a.b: found 2, expected true or false; write one of the two"),
        ("darc", Shade | str, "a.b: found 'darc', expected one of 'dark'; did you mean 'dark'?"),
        ({}, tuple[str, ...], "a.b: found {}, expected a list; write one item per line, each after `- `, or [a, b]"),
        (
            "x",
            InstanceFilterArgs | None,
            "a.b: found 'x', expected a block of settings or null; write them below `a.b:`, indented",
        ),
        ({"seed": {}}, DataArgs, "a.b.seed: found {}, expected a whole number or null; write it as 300 or 5e6"),
        (["a", 1], tuple[str, ...], "a.b[1]: found 1, expected text; put it in quotes: '1'"),
        ("a\0b", str, "a.b: found 'a\\x00b', expected text without the character NUL; remove it"),
        (
            {"x\n\x1b[2Jy": "z"},
            dict[str, float],
            "a.b.x\\n\\x1b[2Jy: found 'z', expected a finite number; write it as 0.1 or 1e-5",
        ),
        (b"x", dict[str, Any], "a.b: found b'x', expected a mapping; write `name: value` pairs"),
    ],
)
def test_what_does_not_fit_is_one_sentence(value, declared, sentence):
    assert read(value, declared)[1] == [sentence]


def test_a_home_directory_is_found_where_no_shell_has_replaced_it(monkeypatch):
    monkeypatch.setenv("HOME", "/h")
    assert read("~/runs/x", str) == ("/h/runs/x", [])
    assert read(["~/a", "b~/c"], tuple[str, ...]) == (("/h/a", "b~/c"), [])
    assert read("~", str | None) == (None, []), "YAML's null"


def test_a_block_reports_all_its_problems_and_keeps_what_is_good():
    problems = Problems()
    data = read_value({"seed": "x", "num_workers": 3, "sedd": 1, "paths": [1]}, DataArgs, "data", problems)
    assert problems.keys == {"data.seed", "data.sedd", "data.paths[0]"}
    assert data == DataArgs(num_workers=3)


def test_a_key_touches_itself_its_parts_and_its_block_but_no_neighbour():
    problems = Problems()
    problems.add("data.paths[0]", "x")
    problems.add("training.scheduler", "y")
    assert problems.touches(["data.paths"])
    assert problems.touches(["training.scheduler.warmup"])
    assert not problems.touches(["data.path"])
    assert not problems.touches(["training.sched"])


def test_values_are_shown_as_in_the_file_and_cut():
    assert [shown(value) for value in (None, True, "a", 0.5)] == ["null", "true", "'a'", "0.5"]
    assert len(shown("x" * 1000)) == 60
    assert nearest("learnin_rate", ["learning_rate", "seed"]) == "learning_rate"
    assert nearest("zzz", ["learning_rate"]) is None


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.text(alphabet="0123456789eExXob_+-. nulltrueoff~", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
DECLARED: dict[Any, Any] = {
    int: int,
    float: float,
    bool: bool,
    str: str,
    int | None: (int, type(None)),
    float | None: (float, type(None)),
    int | str: (int, str),
    Literal["a", "b"]: str,
    tuple[int, ...]: tuple,
    tuple[str, ...]: tuple,
    dict[str, float]: dict,
    dict[str, Any]: dict,
    InstanceFilterArgs: InstanceFilterArgs,
}


@settings(max_examples=300, deadline=None)
@example(value=16**5_000, declared=int)
@example(value=16**5_000, declared=float)
@example(value=[16**5_000], declared=dict[str, Any])
@example(value={"a": 16**5_000}, declared=dict[str, Any])
@example(value="0x" + 5_000 * "f", declared=int)
@example(value="9" * 5_000, declared=int)
@given(value=ANYTHING, declared=st.sampled_from(list(DECLARED)))
def test_any_value_is_of_its_type_or_one_sentence(value: Any, declared: Any) -> None:
    found, sentences = read(value, declared)
    if sentences:
        assert all(sentence.startswith("a.b") for sentence in sentences)
        assert all(len(sentence) < 1_000 and "\n" not in sentence for sentence in sentences)
        return
    assert isinstance(found, DECLARED[declared])
    assert (declared is bool) == isinstance(found, bool)
    if isinstance(found, float):
        assert math.isfinite(found)


@settings(max_examples=200, deadline=None)
@given(number=st.integers(-(10**15), 10**15) | st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_itself_however_it_is_written(number: float) -> None:
    spellings = [number, str(number), repr(number), f" {number} "]
    if isinstance(number, int):
        spellings += [f"{number:_}", hex(number)]
    for spelling in spellings:
        assert read(spelling, float) == (float(number), [])
        if isinstance(number, int):
            assert read(spelling, int) == (number, [])
