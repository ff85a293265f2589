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
from olmo_hf.distributed import is_main_process, world_size
from olmo_hf.errors import ConfigError, OlmoHfError
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.model.size import describe_model
from olmo_hf.recipes.table import memory_of, memory_rows, print_rows
from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.batch_plan import BatchPlan, describe, plan_batches
from olmo_hf.training.build import without_resets
from olmo_hf.training.optimizers import describe_optimizer
from olmo_hf.training.run_directory import OpenedRun
from olmo_hf.training.state import RunState

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


def own_rank() -> int:
    """This process's rank as the launcher says it, before any process group exists."""
    return int(os.environ.get("RANK", "0"))


def quiet_logs() -> None:
    """Our own messages from rank 0, warnings from all; libraries speak only when something is wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()  # a bar for every small model file drowns the run's own line
    logging.getLogger("olmo_hf").setLevel(logging.INFO if own_rank() == 0 else logging.WARNING)


def run_and_report(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run `main`; errors meant for people are printed as sentences: whole by rank 0, in a line by the others.

    Returns:
        Exit code: 0, what `main` says, or 2 for an error that a person can mend.
    """
    quiet_logs()
    try:
        return main(words)
    except OlmoHfError as error:
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        here, said = own_rank(), _without_traceback(error)
        if here == 0:
            sys.stderr.write(f"\nerror: {said}\n(set {DEBUG_VARIABLE}=1 to see where it was raised)\n")
        else:  # most errors are everybody's; one that is this rank's alone must still be seen
            sys.stderr.write(f"rank {here}: error: {said.splitlines()[-1].strip()}\n")
        sys.stderr.flush()
        return 2


def _without_traceback(error: OlmoHfError) -> str:
    """What an error says. Torch hands one of a loader's worker on with the traceback written into its words."""
    text = str(error)
    begin = f"{type(error).__module__}.{type(error).__qualname__}: "
    return text.rpartition(begin)[2].strip() if text.startswith("Caught ") and begin in text else text


def plan_launch(run: RunArgs, opened: OpenedRun, *, num_instances: int) -> tuple[TrainingArgs, BatchPlan]:
    """The training section as this launch uses it, and the plan made from it.

    A launch that continues its own run does not repeat the resets and skips with which the run began.
    """
    training = without_resets(run.training) if opened.from_own else run.training
    counted = RunState() if training.reset_trainer_state else opened.state
    plan = plan_batches(
        training,
        world_size=world_size(),
        sequence_length=run.data.sequence_length,
        num_instances=num_instances,
        step=counted.step,
        tokens_seen=counted.tokens,
        eval_interval=run.evaluation.interval,
    )
    return training, plan


def show_plan(
    run: RunArgs, model: OlmoHfForCausalLM, plan: BatchPlan, opened: OpenedRun, *, with_memory: bool = False
) -> None:
    """The table at the start: what will run, and what it continues."""
    if not is_main_process():
        return
    start = "afresh" if opened.checkpoint is None else f"from {opened.checkpoint} (step {opened.state.step:,})"
    if opened.checkpoint is None and run.model.init_from is not None:
        start += f", with the weights of {run.model.init_from} and a new optimizer"
    rows = [("name", run.name), ("directory", str(opened.directory)), ("starts", start)]
    rows += describe_model(model.config, run.data.sequence_length)
    rows += describe(plan)
    rows += describe_optimizer(model, run.training)
    rows += memory_rows(memory_of(run, model.config, plan)) if with_memory else []
    print_rows(rows)
