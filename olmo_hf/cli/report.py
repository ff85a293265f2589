"""`olmo-hf report RUN [RUN2 ...]`: what happened, as one HTML file and PNGs."""

import argparse
import sys
from pathlib import Path

HELP = "draw a run's record: one self-contained HTML file, loss.png and charts.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the verb."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory; several are drawn together")
    parser.add_argument(
        "-o",
        "--output-dir",
        type=Path,
        help="where report.html, loss.png and charts.png go (default: the first run's directory)",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="for every loss spike, compute the loss of each instance with the last checkpoint before it",
    )


def run(namespace: argparse.Namespace) -> int:
    """Writes the report and says where it is."""
    from olmo_hf.report.write import write_report

    html, png, charts = write_report(namespace.runs, namespace.output_dir, explain=namespace.explain)
    size = html.stat().st_size
    shown = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    print(f"{html} ({shown})\n{png}\n{charts}", file=sys.stdout)
    return 0
