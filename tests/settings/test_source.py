"""Text to plain values: YAML, references, limits."""

import pytest

from olmo_hf.errors import ConfigError
from olmo_hf.settings.problems import Problems
from olmo_hf.settings.source import MAX_SIZE, parse_mapping, parse_value, resolve


def resolved(tree):
    problems = Problems()
    result = resolve(tree, problems)
    return result, problems.sentences


def test_yaml_is_read_with_its_numbers():
    assert parse_mapping("a: 1e-5\nb: [1_000, off, ~]", "x.yaml") == {"a": 1e-5, "b": [1000, False, None]}
    assert parse_mapping("", "x.yaml") == {}
    assert parse_mapping("a: &x {k: 1}\nb: {<<: *x, m: 2}", "x.yaml")["b"] == {"k": 1, "m": 2}


def test_a_value_of_the_command_line_is_read_as_in_a_file():
    assert parse_value("[a, 1e-5]") == ["a", 1e-5]
    assert parse_value("") is None
    with pytest.raises(ConfigError, match="the value: not readable as YAML"):
        parse_value("[a")


def test_references_are_replaced_wherever_they_stand():
    tree = {"name": "n", "a": {"b": "${name}/x-${ name }", "c": ["${a.b}"], "d": 3}, "e": "${a.d}"}
    assert resolved(tree) == ({"name": "n", "a": {"b": "n/x-n", "c": ["n/x-n"], "d": 3}, "e": 3}, [])


def test_one_bad_reference_hides_no_other_problem():
    tree = {"a": "${no}", "b": "${oc.env:HOME}", "c": "${a", "d": "???", "e": 1, "f": "${f}", "g": "${e.x}"}
    result, sentences = resolved(tree)
    assert [sentence.partition(":")[0] for sentence in sentences] == ["a", "b", "c", "d", "f", "g"]
    assert result == {"e": 1}


def test_growth_is_found_before_it_happens():
    tree = {"a0": "x" * 1000} | {f"a{n}": f"${{a{n - 1}}}" * 10 for n in range(1, 30)}
    _, sentences = resolved(tree)
    assert sentences
    assert all(f"grows beyond {MAX_SIZE}" in sentence for sentence in sentences)
    _, sentences = resolved({"a": {"b": "${a}"}})
    assert sentences == ["a.b: `${a}` leads back to itself; write one of the values out"]
