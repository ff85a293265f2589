"""The ways of doing a part of a step, timed side by side, all do it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_way_of_every_part_is_timed() -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / "ideas.py"), "none", "--rounds", "1", "--threads", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    timed = [row for row in rows if row[2].replace(".", "").isdigit()]
    assert len(timed) == 14
    assert {row[0] for row in timed} == {"norms", "attention", "projections", "clipping", "updates", "loading"}
    assert all(float(row[2]) > 0 for row in timed)
