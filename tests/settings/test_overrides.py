"""Words of a command line, laid over a tree."""

from typing import Any

import pytest

from olmo_hf.settings.overrides import Override, apply_overrides, split_overrides
from olmo_hf.settings.problems import Problems


def split(*words: str) -> list[Override]:
    problems = Problems()
    overrides = split_overrides(words, problems)
    assert not problems.sentences
    return overrides


def applied(tree: dict[str, Any], *words: str) -> dict[str, Any]:
    problems = Problems()
    apply_overrides(tree, split_overrides(words, problems), problems)
    assert not problems.sentences, problems.sentences
    return tree


@pytest.mark.parametrize(
    ("words", "path", "text", "negated"),
    [
        (["--a.b=c"], ("a", "b"), "c", False),
        (["--a.b", "c"], ("a", "b"), "c", False),
        (["a.b=c"], ("a", "b"), "c", False),
        (["--a-b.c-d=e-f"], ("a-b", "c-d"), "e-f", False),
        (["--a=x=y"], ("a",), "x=y", False),
        (["--a="], ("a",), "", False),
        (["--a", "-1"], ("a",), "-1", False),
        (["--a[2].b=c"], ("a", "2", "b"), "c", False),
        (["--a"], ("a",), None, False),
        (["--no-a.b"], ("a", "b"), None, True),
    ],
)
def test_one_setting_in_all_its_spellings(words, path, text, negated):
    assert split(*words) == [Override(path, text, negated)]


def test_a_switch_before_another_setting_takes_no_value():
    assert [override.text for override in split("--a", "--b", "1", "--no-c", "--d=2")] == [None, "1", None, "2"]


def test_values_are_what_they_would_be_in_the_file():
    tree = applied(
        {},
        "--name=1e5",
        "--training.learning_rate=1e-5",
        "--training.bf16",
        "--no-callbacks.console",
        "--data.paths=[a, b]",
        "--evaluation.evaluators=[{label: x}]",
        "--training.max_duration=2ep",
        "--data.token-dtype=null",
        "--data.sources.my-web.weight=2",
        "--model.config.hidden-size=64",
    )
    assert tree == {
        "name": "1e5",
        "training": {"learning_rate": 1e-5, "bf16": True, "max_duration": "2ep"},
        "callbacks": {"console": None},
        "data": {"paths": ["a", "b"], "token_dtype": None, "sources": {"my-web": {"weight": 2}}},
        "model": {"config": {"hidden_size": 64}},
        "evaluation": {"evaluators": [{"label": "x"}]},
    }


def test_a_setting_below_what_is_no_block_is_refused():
    problems = Problems()
    tree = {"training": "${other}", "data": {"paths": ["a"]}}
    overrides = split_overrides(["--training.seed=1", "--data.paths.5=x", "--data.seed.x=1"], problems)
    apply_overrides(tree, overrides, problems)
    assert problems.sentences == [
        "--training.seed: `training` is '${other}' in the file; set it as a whole",
        "--data.paths.5: the list in the file has 1 items, numbered from 0",
        "--data.seed.x: `data.seed` is a single value, has no `x`",
    ]
    assert tree == {"training": "${other}", "data": {"paths": ["a"]}}
