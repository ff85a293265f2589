"""Tests that take long: each says why, files with them begin first, and those that do not say so are named at the end.

A plugin of pytest, loaded by `conftest.py`. What a test takes is its call and what was set up for it; a busy machine
makes both longer, so that it is said and fails nothing.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_SECONDS = 20.0
"""What a test may take on a quiet machine without a reason."""

FIRST = (
    "golden/test_trajectories.py",
    "crash",
    "invariants",
    "callbacks",
    "test_stock_tools.py",
    "parity",
)
"""Folders and files that begin first: two workers take files one by one, and a long one at the end is waited for."""

ROOT = Path(__file__).parent


class Durations:
    """Adds up what every test took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.said: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "teardown":
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if "takes" in report.keywords or "slow" in report.keywords:
            self.said.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.unexplained():
            terminalreporter.write_line(line)

    def unexplained(self) -> Iterator[str]:
        """One line for every test over the limit that says nothing, the longest first."""
        long = {name: seconds for name, seconds in self.seconds.items() if seconds > LIMIT_SECONDS}
        unsaid = sorted(long.keys() - self.said, key=lambda name: -long[name])
        if unsaid:
            yield f"over {LIMIT_SECONDS:.0f} s without `@pytest.mark.takes(SECONDS, WHY)`; a busy machine is slower:"
        for name in unsaid:
            yield f"  {long[name]:6.1f} s  {name}"


def place_of(path: Path) -> int:
    """When a file begins: by the list, and everything else after it."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    found = [place for place, prefix in enumerate(FIRST) if name == prefix or name.startswith(f"{prefix}/")]
    return found[0] if found else len(FIRST)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.path))  # stable: a file stays whole
