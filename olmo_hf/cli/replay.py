"""`olmo-hf replay RUN --step N`: trains the steps up to N again and compares them with the record."""

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from olmo_hf.errors import DataError

if TYPE_CHECKING:
    from olmo_hf.replay.compare import Comparison
    from olmo_hf.replay.way import Way

HELP = "train the steps before N again, from the nearest checkpoint, and compare loss and gradient norm"

ELSEWHERE_TOLERANCE = 1e-5
"""Relative; with another number of processes, or where the device does not add up in a fixed order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the verb."""
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory; it is only read")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step to come to")
    parser.add_argument(
        "--attempt", type=int, metavar="K", help="of a step trained several times: which time, from 1 (default: last)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative difference (default: 0 on a CPU with as many processes as the run had, else "
        f"{ELSEWHERE_TOLERANCE:g})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the comparison as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Trains again, compares, prints. Returns 0 when all is equal, 1 when something differs."""
    if namespace.tolerance is not None and not 0 <= namespace.tolerance < math.inf:
        raise DataError(f"--tolerance: found {namespace.tolerance}, expected 0 or more")
    take_threads_of(namespace.run)
    import torch

    from olmo_hf.distributed import is_main_process, start_processes, world_size
    from olmo_hf.replay.compare import compare
    from olmo_hf.replay.record import read_record
    from olmo_hf.replay.rerun import train_again
    from olmo_hf.replay.way import find_way

    start_processes()
    way = find_way(read_record(namespace.run.resolve()), namespace.step, attempt=namespace.attempt)
    notes = list(way.notes)
    others = sorted({s.launch.world_size for s in way.segments} - {world_size()})
    if others:
        notes.append(
            f"the run had {' or '.join(map(str, others))} processes and this is {world_size()}, where dropout "
            "draws other masks and sums are made in another order; for an exact replay start it as the run was, "
            "with `-m olmo_hf.cli.main replay` for `train_hf.py CONFIG`"
        )
    threads = {s.launch.threads for s in way.segments if s.launch.threads is not None} - {1, torch.get_num_threads()}
    if threads and not torch.cuda.is_available():
        most = max(threads)
        notes.append(
            f"the run had {most} threads and this is started with {torch.get_num_threads()}, where sums are made in "
            f"another order; for an exact replay start it with OMP_NUM_THREADS={most}"
        )
    exact = not others and not torch.cuda.is_available()
    tolerance = namespace.tolerance
    if tolerance is None:
        tolerance = 0.0 if exact else ELSEWHERE_TOLERANCE
    if is_main_process():
        _print_way(way, notes)
    with _shared_directory() as workdir:
        found = train_again(way, workdir)
    recorded = {step: row for segment in way.segments for step, row in segment.rows.items()}
    comparisons = compare(recorded, found)
    equal = all(one.is_equal(tolerance) for one in comparisons)
    if is_main_process():
        _print(comparisons, tolerance=tolerance, equal=equal)
        if namespace.json is not None:
            _write_json(namespace.json, _as_json(namespace, way, comparisons, notes, tolerance, equal))
    return 0 if equal else 1


def take_threads_of(run: Path) -> None:
    """As many threads as the run had, the most of its launches, unless somebody has said how many.

    Must come before torch is imported: told afterwards, torch divides the same work in another way.
    """
    from olmo_hf.callbacks.json_lines import read_json_lines
    from olmo_hf.report.history import LAUNCHES_FILE

    if "torch" in sys.modules or "OMP_NUM_THREADS" in os.environ or not (run / LAUNCHES_FILE).is_file():
        return
    threads = [row.get("threads") for row in read_json_lines(run / LAUNCHES_FILE)]
    if counts := [number for number in threads if isinstance(number, int)]:
        os.environ["OMP_NUM_THREADS"] = str(max(counts))


@contextlib.contextmanager
def _shared_directory() -> Iterator[Path]:
    """An empty directory, under the same name on all ranks."""
    from olmo_hf.distributed import barrier, broadcast_object, is_main_process

    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory()) if is_main_process() else ""
        directory = Path(broadcast_object(name))
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        barrier()


def _print_way(way: "Way", notes: list[str]) -> None:
    start = "the beginning of the run" if way.checkpoint is None else way.checkpoint.name
    first, last = way.segments[0].first_step, way.segments[-1].last_step
    print(f"from {start}: steps {first + 1} to {last}", flush=True)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def _print(comparisons: "list[Comparison]", *, tolerance: float, equal: bool) -> None:
    from olmo_hf.replay.record import GRADIENT_NORM, LOSS

    names = {LOSS: "cross-entropy", GRADIENT_NORM: "gradient norm"}
    print(f"{'step':>8}  {'metric':<13}  {'recorded':>22}  {'found again':>22}  {'difference':>10}")
    for one in comparisons:
        print(
            f"{one.step:>8}  {names[one.metric]:<13}  {one.recorded!r:>22}  {one.found!r:>22}  {one.difference:>10.3g}"
        )
    bound = "to the last bit" if tolerance == 0 else f"within {tolerance:g} of what was recorded"
    print(f"{'equal' if equal else 'NOT equal'} {bound}")


def _as_json(
    namespace: argparse.Namespace,
    way: "Way",
    comparisons: "list[Comparison]",
    notes: list[str],
    tolerance: float,
    equal: bool,
) -> dict[str, Any]:
    return {
        "run": str(namespace.run),
        "step": namespace.step,
        "checkpoint": None if way.checkpoint is None else way.checkpoint.name,
        "first_step": way.segments[0].first_step + 1,
        "equal": equal,
        "tolerance": tolerance,
        "largest_difference": max((one.difference for one in comparisons), default=math.nan),
        "notes": notes,
        "steps": [
            {
                "step": one.step,
                "metric": one.metric,
                "recorded": one.recorded,
                "found": one.found,
                "difference": one.difference,
            }
            for one in comparisons
        ],
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    from olmo_hf.callbacks.json_lines import strict_json

    try:
        path.write_text(json.dumps(strict_json(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"--json: {path} cannot be written ({error}); choose another place") from error
