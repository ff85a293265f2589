"""The table of logits in docs/parity.md says what is measured now."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.parity.original import VARIANTS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("docs_parity_logits", DOCS / "parity_logits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_architecture_and_its_figures_hold(script):
    _, written, _ = script.section((DOCS / "parity.md").read_text(encoding="utf-8"))
    rows = [script.measure(name) for name in VARIANTS]
    # Which machine measured shows in the last bits of the third column only.
    assert [line.split("|")[:3] for line in written.splitlines()] == [
        line.split("|")[:3] for line in script.table(rows).splitlines()
    ]
    figures = re.findall(r"\| ([\d.e+-]+) \| (?:0|not there) \|$", written, re.M)
    assert len(figures) == len(VARIANTS), (
        "the difference from stock transformers is 0 wherever it has the architecture"
    )
    for row, figure in zip(rows, figures, strict=True):
        assert row.from_original <= 1e-5
        assert float(figure) <= 1e-5
        assert row.from_stock in (0.0, None)
