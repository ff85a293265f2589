"""What surrounds a launch: the command line, log output, and how failures are told to people."""

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils import logging as transformers_logging

from olmo_hf.args import RunArgs
from olmo_hf.errors import ConfigError, OlmoHfError
from olmo_hf.training.run_directory import OpenedRun

DEBUG_VARIABLE = "OLMO_HF_DEBUG"


@dataclass(frozen=True)
class Options:
    """The command line of `train_hf.py`."""

    config: Path
    dry_run: bool = False
    skip_data: bool = False
    overrides: list[str] = field(default_factory=list)


def read_command_line(words: Sequence[str]) -> Options:
    """`CONFIG.yaml [--dry_run] [--section.field=value ...]`."""
    parser = argparse.ArgumentParser(
        prog="train_hf.py",
        description="Pretrain a model, or go on where an earlier launch stopped.",
        epilog="Every setting of the YAML can be given as --section.field=value, for example "
        "--training.learning_rate=3e-4.",
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the run's settings")
    parser.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="build everything, print the plan, stop before step 1"
    )
    parser.add_argument(
        "--skip_data",
        "--skip-data",
        action="store_true",
        help="with --dry_run: print the plan without opening data, tokenizer or checkpoints that are elsewhere",
    )
    known, overrides = parser.parse_known_args(list(words))
    if known.skip_data and not known.dry_run:
        raise ConfigError("--skip_data: only a --dry_run can do without its data; give both, or leave it out")
    return Options(known.config, known.dry_run, known.skip_data, overrides)


def run_directory(run: RunArgs) -> Path:
    """`training.output_dir`, or `runs/NAME`."""
    return Path(run.training.output_dir) if run.training.output_dir else Path("runs") / run.name


def quiet_logs(*, main_process: bool) -> None:
    """Our own messages from rank 0, warnings from all; libraries speak only when something is wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()  # a bar for every small model file drowns the run's own line
    logging.getLogger("olmo_hf").setLevel(logging.INFO if main_process else logging.WARNING)


def run_and_report(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run `main`; errors meant for people are printed as sentences, on rank 0 only.

    Returns:
        Exit code: 0, what `main` says, or 2 for an error that a person can mend.
    """
    try:
        return main(words)
    except OlmoHfError as error:
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        if int(os.environ.get("RANK", "0")) == 0:
            sys.stderr.write(f"\nerror: {error}\n(set {DEBUG_VARIABLE}=1 to see where it was raised)\n")
            sys.stderr.flush()
        return 2


def print_plan(name: str, rows: Sequence[tuple[str, str]], opened: OpenedRun, *, main_process: bool) -> None:
    """The table at the start: what will run, and what it continues."""
    if not main_process:
        return
    start = "afresh" if opened.checkpoint is None else f"from {opened.checkpoint} (step {opened.state.step:,})"
    everything = [("run", name), ("directory", str(opened.directory)), ("starts", start), *rows]
    width = max(len(label) for label, _ in everything)
    sys.stdout.write("".join(f"{label:<{width}}  {value}\n" for label, value in everything) + "\n")
    sys.stdout.flush()
