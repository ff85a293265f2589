"""Figures read from what a command printed: pure functions of text, one per kind of output.

A reading says what was found, what was asked for, and whether the one satisfies the other. Output in which nothing can
be read satisfies nothing.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

COUNTED = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
"""What pytest counts in its last line, apart from `deselected` and warnings."""

NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|nan|inf"
"""A distance: never below 0."""


@dataclass(frozen=True)
class Figure:
    """What a measurement came to."""

    found: str
    target: str
    met: bool
    remarks: tuple[str, ...] = ()
    """Further lines for the reader, such as why tests were skipped."""


Reading = Callable[[str, int], Figure]
"""From the output and the exit status of a command."""


def all_pass(output: str, status: int) -> Figure:
    """The counts of pytest's last line; the reasons for skips are remarks."""
    target = "all pass"
    summaries = re.findall(r"^=*\s*((?:[0-9]+ \w+(?:, )?)+) in [0-9.:]+", output, re.M)
    if not summaries:
        return Figure("no count of tests", target, False)
    counts = {word.rstrip("s") if word == "errors" else word: int(n) for n, word in _pairs(summaries[-1])}
    found = ", ".join(f"{counts[word]} {word}" for word in COUNTED if counts.get(word)) or "no test"
    skips = [" ".join(line.split()[1:]) for line in re.findall(r"^SKIPPED .*$", output, re.M)]
    met = status == 0 and counts.get("passed", 0) > 0 and not counts.get("failed") and not counts.get("error")
    return Figure(found, target, met, tuple(skips))


def _pairs(summary: str) -> list[tuple[str, str]]:
    return re.findall(r"([0-9]+) (\w+)", summary)


def largest(pattern: str, limit: float, *, what: str) -> Reading:
    """The largest number that `pattern` finds (its one group, in every line) is at most `limit`.

    Args:
        pattern: a regular expression with one group, which is a number.
        limit: still allowed.
        what: the numbers, in words.
    """

    def read(output: str, status: int) -> Figure:
        target = f"{limit:.0e} at most" if limit else "0"
        words = re.findall(pattern, output, re.M)
        if not words or not all(re.fullmatch(NUMBER, word) for word in words):
            return Figure("no figure", target, False)
        numbers = [float(word) for word in words]
        bad = [number for number in numbers if not number <= limit]  # also what is no number
        worst = bad[0] if bad else max(numbers)
        count = f" ({len(numbers)} figures)" if len(numbers) > 1 else ""
        return Figure(f"{what} {worst:.1e}{count}", target, status == 0 and not bad)

    return read


def every_line(pattern: str, *, of: str, what: str) -> Reading:
    """No line that `of` finds is without a match of `pattern`, and there is such a line.

    Args:
        pattern: what every line must have.
        of: which lines count.
        what: lines that have it, in words.
    """

    def read(output: str, status: int) -> Figure:
        lines = [line for line in output.splitlines() if re.search(of, line)]
        good = sum(bool(re.search(pattern, line)) for line in lines)
        met = status == 0 and 0 < good == len(lines)
        return Figure(f"{good} of {len(lines)} {what}", "all", met)

    return read


def together(*readings: Reading) -> Reading:
    """Several figures of one output: all must satisfy."""

    def read(output: str, status: int) -> Figure:
        figures = [reading(output, status) for reading in readings]
        return Figure(
            "; ".join(figure.found for figure in figures),
            "; ".join(figure.target for figure in figures),
            all(figure.met for figure in figures),
            tuple(remark for figure in figures for remark in figure.remarks),
        )

    return read


def kills(output: str, status: int) -> Figure:
    """The table of `tests.crash.torture`: kills, those inside a save, restarts, runs, mismatches."""
    target = "no mismatch"
    rows = re.findall(r"^\| [\w-]+ \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| \d+ \|$", output, re.M)
    if not rows:
        return Figure("no table", target, False)
    killed, in_save, restarts, _, mismatches = (sum(int(row[place]) for row in rows) for place in range(5))
    found = f"{killed} kills, {in_save} of them inside a save, {restarts} restarts: {mismatches} mismatches"
    return Figure(found, target, status == 0 and killed > 0 and restarts > 0 and mismatches == 0)
