"""Figures read from what commands print: those that hold, those that do not, and output without any."""

import pytest

from benchmarks.measuring.figures import all_pass, every_line, kills, largest, together

KILLS = """torch 2.13.0, Linux, seed 0

| mode | kills | inside a save | restarts | runs | mismatches | seconds |
|---|---|---|---|---|---|---|
| one | 20 | 3 | 18 | 5 | 0 | 61 |
| fsdp2-async | 10 | 1 | 9 | 4 | 0 | 102 |
"""


@pytest.mark.parametrize(
    ("output", "status", "found", "met"),
    [
        ("....\n4 passed in 0.02s\n", 0, "4 passed", True),
        ("== 1 failed, 12 passed, 3 deselected in 62.10s (0:01:02) ==\n", 1, "12 passed, 1 failed", False),
        ("3 passed, 2 warnings, 1 error in 9.99s\n", 1, "3 passed, 1 error", False),
        ("3 passed, 2 errors in 9.99s\n", 1, "3 passed, 2 error", False),
        ("7 skipped in 0.1s\n", 0, "7 skipped", False),
        ("5 deselected in 0.1s\n", 5, "no test", False),
        ("4 passed in 0.02s\n", 1, "4 passed", False),
        ("Killed\n", -9, "no count of tests", False),
        ("1 passed in 3s of another test\n....\n2 passed in 1.00s\n", 0, "2 passed", True),
    ],
)
def test_counts_of_tests(output, status, found, met):
    figure = all_pass(output, status)
    assert (figure.found, figure.met) == (found, met)


def test_why_tests_were_skipped_is_kept():
    figure = all_pass("SKIPPED [2] tests/a.py:3: needs a CUDA device\n1 passed, 2 skipped in 0.10s\n", 0)
    assert (figure.found, figure.met) == ("1 passed, 2 skipped", True)
    assert figure.remarks == ("[2] tests/a.py:3: needs a CUDA device",)


@pytest.mark.parametrize(
    ("output", "status", "found", "met"),
    [
        ("off by 2.0e-07\noff by 9e-07\n", 0, "weight 9.0e-07 (2 figures)", True),
        ("off by 1e-06\n", 0, "weight 1.0e-06", True),
        ("off by 1.1e-06\noff by 0\n", 0, "weight 1.1e-06 (2 figures)", False),
        ("off by nan\noff by 0\n", 0, "weight nan (2 figures)", False),
        ("off by 0\n", 1, "weight 0.0e+00", False),
        ("on\n", 0, "no figure", False),
        ("off by much\n", 0, "no figure", False),
    ],
)
def test_largest_number(output, status, found, met):
    figure = largest(r"^off by (.*)$", 1e-6, what="weight")(output, status)
    assert (figure.found, figure.met, figure.target) == (found, met, "1e-06 at most")


def test_a_limit_of_nothing_is_written_so():
    figure = largest(r"^(.+)$", 0.0, what="weight")("0\n0\n", 0)
    assert (figure.met, figure.target) == (True, "0")


@pytest.mark.parametrize(
    ("output", "status", "found", "met"),
    [
        ("| a | equal |\nelse\n| b | equal |\n", 0, "2 of 2 runs", True),
        ("| a | equal |\n| b | DIFFERENT |\n", 0, "1 of 2 runs", False),
        ("| a | equal |\n", 1, "1 of 1 runs", False),
        ("else\n", 0, "0 of 0 runs", False),
    ],
)
def test_every_line_has_it(output, status, found, met):
    figure = every_line(r"\| equal \|", of=r"^\| ", what="runs")(output, status)
    assert (figure.found, figure.met) == (found, met)


def test_figures_together_hold_only_if_all_do():
    small, smaller = largest(r"^(.+)$", 1e-5, what="a"), largest(r"^(.+)$", 1e-6, what="b")
    assert together(small, smaller)("1e-7\n", 0).met
    figure = together(small, smaller)("2e-6\n", 0)
    assert not figure.met
    assert figure.found == "a 2.0e-06; b 2.0e-06"
    assert figure.target == "1e-05 at most; 1e-06 at most"


def test_kills():
    figure = kills(KILLS, 0)
    assert figure.met
    assert figure.found == "30 kills, 4 of them inside a save, 27 restarts: 0 mismatches"
    assert not kills(KILLS, 1).met
    assert not kills(KILLS.replace("| 0 | 61", "| 1 | 61"), 1).met
    assert not kills(KILLS.replace("| 0 | 61", "| 1 | 61"), 0).met
    assert not kills(KILLS.replace("20", "0").replace("10 ", "0 "), 0).met, "nobody was killed"
    assert not kills("| mode | kills |\n", 0).met
