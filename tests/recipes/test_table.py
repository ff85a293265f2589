"""How the table of a plan looks on a terminal and in a file."""

import io

import pytest

from olmo_hf.recipes import table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROWS = [("a", "1"), ("label", "one two three four five six seven eight nine ten")]


@pytest.mark.parametrize(
    ("stream", "columns", "shown"),
    [
        (io.StringIO(), 42, "a      1\nlabel  one two three four five six seven eight nine ten\n"),
        (Terminal(), 42, "a      1\nlabel  one two three four five six seven\n       eight nine ten\n"),
        (Terminal(), 20, "a      1\nlabel  one two three four five six seven eight nine ten\n"),
    ],
)
def test_long_values_are_folded_on_a_terminal(stream, columns, shown, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", stream)
    table.print_rows(ROWS)
    assert stream.getvalue() == shown
