"""Tries every promise of this project again on a fresh clone, and writes docs/promises.md: what `make promises` does.

python benchmarks/promises.py [--only NAME ...] [--output PAGE] [--list]

Every row of the page is a command that is run, and a figure that is read from what it printed; the list of both is
`benchmarks/measuring/promised.py`. What is tried is the last commit, cloned into a directory that is thrown away, with
the packages of this environment: changes that are not committed count for nothing. About twenty minutes on two cores;
the machine should be idle. With `--only` the other rows say that they were not measured, and the page is written to
build/ unless `--output` says otherwise. What needs a GPU, or hours, says so in its row. The exit status is 1 if a
promise was not kept.
"""

import argparse
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring.figures import Figure  # noqa: E402
from benchmarks.measuring.promised import PROMISES, Measure, Promise  # noqa: E402
from benchmarks.measuring.surroundings import surroundings  # noqa: E402
from benchmarks.suite import has_gpu  # noqa: E402

PAGE = ROOT / "docs" / "promises.md"
ELSEWHERE = ROOT / "build" / "promises.md"
"""Where a page goes that has only some of the rows."""

LIMIT_SECONDS = 900.0
"""Of one command."""

HEAD = """# What is promised, and whether it holds

<!-- Written by benchmarks/promises.py from what its commands printed: `make promises`. -->

Each row is a command, run in a fresh clone of the commit below (`PYTHONPATH` is the clone, `OMP_NUM_THREADS` is 1),
and the figure read from what it printed. A row that was not measured says why; it proves nothing.
`python benchmarks/promises.py --list` names the rows, and `--only NAME` runs some of them."""


@dataclass(frozen=True)
class Row:
    """What became of one measure."""

    measure: Measure
    figure: Figure | None
    """None: it was not run."""
    seconds: float = 0.0
    why_not: str = ""

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return "not measured"
        return "met" if self.figure.met else "NOT MET"


def clone(directory: Path) -> Path:
    """The last commit, as somebody gets it who has never been here."""
    target = directory / "clone"
    command = ["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"{ROOT} cannot be cloned: {done.stderr.strip()}; promises are tried on a fresh clone of a repository"
        )
    return target


def commit_of(where: Path) -> str:
    """The commit that a clone has."""
    command = ["git", "-C", str(where), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def end_all(process: subprocess.Popen[str]) -> None:
    """End a command and what it started."""
    os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # something that left its group may still hold the pipe
        process.communicate(timeout=5)


def try_it(measure: Measure, where: Path) -> Row:
    """Run one command in the clone and read its figure."""
    # The clone must win over an installed package, and a figure must not depend on how many threads added it up.
    environment = {**os.environ, "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1"}
    if not has_gpu():
        environment["ACCELERATE_USE_CPU"] = "true"
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *measure.words],
        cwd=where,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its children can be ended with it
    )
    try:
        printed, complaints = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        end_all(process)
        return Row(measure, Figure(f"not done after {LIMIT_SECONDS:.0f} s", "an end", False), LIMIT_SECONDS)
    except KeyboardInterrupt:
        end_all(process)
        raise
    figure = measure.reading(printed, process.returncode)
    if not figure.met:
        print(printed[-4000:], complaints[-4000:], sep="\n", file=sys.stderr, flush=True)
    return Row(measure, figure, time.perf_counter() - began)


def why_not(measure: Measure, only: list[str]) -> str:
    """Why a measure is not run here; empty when it is."""
    if measure.needs == "a GPU" and not has_gpu():
        return "needs a GPU, and there is none here"
    if measure.needs and measure.needs != "a GPU" and measure.name not in only:
        return f"needs {measure.needs}"
    if only and measure.name not in only:
        return "not asked for in this run"
    return ""


def cell(text: str) -> str:
    """Text that cannot end a cell of a table, nor become a link or a tag."""
    return text.replace("|", "\\|").replace("\n", " ")


def summary(rows: list[Row]) -> str:
    """One sentence: how many hold, and the names of those that do not, or were not tried."""
    names = {
        verdict: [row.measure.name for row in rows if row.verdict == verdict]
        for verdict in ("met", "NOT MET", "not measured")
    }
    said = f"{len(names['met'])} of {len(rows)} measurements hold; "
    said += f"not met: {', '.join(names['NOT MET'])}" if names["NOT MET"] else "none that was made fails"
    return said + (f"; not measured: {', '.join(names['not measured'])}." if names["not measured"] else ".")


def section(promise: Promise, rows: list[Row]) -> list[str]:
    """A promise, its rows, and why what was skipped was skipped."""
    lines = [f"## {promise.title}", "", promise.says, ""]
    lines += ["| what | command | figure | target | | seconds |", "|---|---|---|---|---|---|"]
    remarks: list[str] = []
    for row in rows:
        command = f"`python {' '.join(row.measure.words)}`"
        found = row.why_not if row.figure is None else row.figure.found
        target = row.measure.target if row.figure is None else row.figure.target
        seconds = "" if row.figure is None else f"{row.seconds:.0f}"
        cells = [f"{row.measure.says} (`{row.measure.name}`)", command, found, target, row.verdict, seconds]
        lines.append(f"| {' | '.join(map(cell, cells))} |")
        remarks += [] if row.figure is None else [f"- `{row.measure.name}`: {one}" for one in row.figure.remarks]
    return [*lines, "", *(["Skipped here:", "", *remarks, ""] if remarks else [])]


def page(rows: list[Row], head: list[str]) -> str:
    """The whole page."""
    lines = [HEAD, "", *head, "", f"Result: {summary(rows)}", ""]
    for promise in PROMISES:
        lines += section(promise, [row for row in rows if row.measure in promise.measures])
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these rows, and no others")
    parser.add_argument("--output", type=Path, help="the page (default: docs/promises.md; with --only, build/)")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    options = parser.parse_args()
    measures = [measure for promise in PROMISES for measure in promise.measures]
    names = [measure.name for measure in measures]
    if options.list:
        print("\n".join(f"{measure.name:<20} python {' '.join(measure.words)}" for measure in measures))
        return 0
    if unknown := sorted(set(options.only) - set(names)):
        parser.error(f"no such row: {', '.join(unknown)}; there are {', '.join(names)}")
    output = options.output or (ELSEWHERE if options.only else PAGE)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        where = clone(Path(directory))
        head = [
            line for line in surroundings() if not line.startswith("- commit")
        ]  # that of these files, changes and all
        head += [f"- commit: {commit_of(where)}", f"- date: {datetime.date.today().isoformat()}"]
        interrupted = ""
        for measure in measures:
            reason = interrupted or why_not(measure, options.only)
            try:
                row = Row(measure, None, why_not=reason) if reason else try_it(measure, where)
            except KeyboardInterrupt:
                interrupted = "the run was interrupted"
                row = Row(measure, None, why_not=interrupted)
                reason = interrupted
            rows.append(row)
            found = reason if row.figure is None else row.figure.found
            print(f"{measure.name}: {row.verdict}: {found} ({row.seconds:.0f} s)", flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(rows, head), encoding="utf-8")
    print(summary(rows), f"{output}", sep="\n")
    if output.resolve() == PAGE:  # the README and the index repeat what the page says
        subprocess.run([sys.executable, str(ROOT / "docs" / "generate.py")], check=True, stdout=subprocess.DEVNULL)
    return 1 if any(row.verdict == "NOT MET" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
