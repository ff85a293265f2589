"""What surrounds a launch: the command line, log output, and how failures are told to people."""

import argparse
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from olmo_hf.args import RunArgs
from olmo_hf.callbacks.args import rollback_problems
from olmo_hf.distributed import is_main_process, launched_sharding, start_processes, world_size
from olmo_hf.errors import ConfigError, DamagedCheckpointError, OlmoHfError
from olmo_hf.fault_watch import announce_fault, start_fault_watch, stop_fault_watch
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.model.size import describe_model
from olmo_hf.output import keep_output
from olmo_hf.recipes.memory import estimate_memory
from olmo_hf.recipes.table import memory_rows, memory_settings, print_rows
from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.batch_plan import BatchPlan, describe, plan_batches
from olmo_hf.training.build import without_resets
from olmo_hf.training.optimizers import describe_optimizer
from olmo_hf.training.run_directory import OpenedRun, open_run
from olmo_hf.training.state import RunState

logger = logging.getLogger(__name__)

DEBUG_VARIABLE = "OLMO_HF_DEBUG"
EXIT_CODE_FILE_VARIABLE = "OLMO_HF_EXIT_CODE_FILE"

VERIFY_FIRST = "--verify_first"

USER_ERROR = 2
"""Exit code for an error that a person can mend, and a restart cannot."""


@dataclass(frozen=True)
class Options:
    """The command line of `train_hf.py`."""

    config: Path
    dry_run: bool = False
    skip_data: bool = False
    verify_first: bool = False
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
    parser.add_argument(
        VERIFY_FIRST,
        action="store_true",
        help="compare all files of a checkpoint with its manifest before it is chosen, not while they are read",
    )
    known, overrides = parser.parse_known_args(list(words))
    if known.skip_data and not known.dry_run:
        raise ConfigError("--skip_data: only a --dry_run can do without its data; give both, or leave it out")
    return Options(known.config, known.dry_run, known.skip_data, known.verify_first, overrides)


def run_directory(run: RunArgs) -> Path:
    """`training.output_dir`, or `runs/NAME`."""
    return Path(run.training.output_dir) if run.training.output_dir else Path("runs") / run.name


def join_processes(run: RunArgs) -> None:
    """Join the other processes of this launch, and learn from now on when one of them fails."""
    start_processes(run.training.transformers.get("ddp_timeout"))  # made before Hugging Face's arguments could say so
    start_fault_watch(leave_for_fault)


def own_rank() -> int:
    """This process's rank as the launcher says it, before any process group exists."""
    stated = os.environ.get("RANK", "0")
    return int(stated) if stated.isdecimal() else 0  # `check_launch` says so


def quiet_logs() -> None:
    """Our own messages from rank 0, warnings from all; libraries speak only when something is wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    transformers_logging.disable_progress_bar()  # a bar for every small model file drowns the run's own line
    logging.getLogger("olmo_hf").setLevel(logging.INFO if own_rank() == 0 else logging.WARNING)


def run_and_report(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run `main`; errors meant for people are printed as sentences: whole by rank 0, in a line by the others.

    Where other ranks wait for this one, they are told. A stop that was asked for and an error for people go through
    `for_launcher`; any other error is raised on, and a launcher that restarts may try again.

    Returns:
        Exit code: 0, what `main` says, or 2 for an error that a person can mend.
    """
    keep_output()
    quiet_logs()
    forget_last_exit_code()
    try:
        code = _main_on_whole_checkpoint(main, words)
        if code != 0 and own_rank() == 0:
            sys.stderr.write(about_launcher(code))
        return for_launcher(code, told=code if own_rank() == 0 else 0)
    except OlmoHfError as error:
        announce_fault(str(error), USER_ERROR)
        if os.environ.get(DEBUG_VARIABLE):
            traceback.print_exc()
        here, said = own_rank(), _without_traceback(error)
        if here == 0:
            sys.stderr.write(f"\nerror: {said}\n(set {DEBUG_VARIABLE}=1 to see where it was raised)\n")
            sys.stderr.write(about_launcher(USER_ERROR))
        else:  # most errors are everybody's; one that is this rank's alone must still be seen
            sys.stderr.write(f"rank {here}: error: {said.splitlines()[-1].strip()}\n")
        sys.stderr.flush()
        return for_launcher(USER_ERROR, told=USER_ERROR)
    except BaseException as error:
        # A rank that waits in a collective learns of another's end as an error of the connection.
        cause = announce_fault(f"{type(error).__name__}: {error}", 1)
        if cause is not None:
            sys.stderr.write(f"{cause}\n")
            sys.stderr.flush()
        raise
    finally:
        stop_fault_watch()


def _main_on_whole_checkpoint(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run `main`; when the checkpoint it takes up proves to be damaged, again from one that is whole.

    Nothing was trained by then. Damage is rare, and a second start cheaper than reading every checkpoint twice.
    """
    try:
        return main(words)
    except DamagedCheckpointError as error:
        if VERIFY_FIRST in words:
            raise
        logger.warning("starting once more, from a checkpoint that is whole: %s", error)
    stop_fault_watch()
    gc.collect()  # the model and the optimizer that were to be filled
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return main([*words, VERIFY_FIRST])


def about_launcher(code: int) -> str:
    """A line about the traceback with which `accelerate launch` and `torchrun` answer any exit status but 0."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ
    if not launched or os.environ.get(EXIT_CODE_FILE_VARIABLE):
        return ""
    return f"(exit status {code}; a traceback below this line is the launcher's own and says no more)\n"


def forget_last_exit_code() -> None:
    """What the processes before a restart left for the script says nothing about these; one of a node removes it."""
    path = os.environ.get(EXIT_CODE_FILE_VARIABLE)
    if path and os.environ.get("LOCAL_RANK", "0") == "0":
        Path(path).unlink(missing_ok=True)


def for_launcher(code: int, *, told: int) -> int:
    """The exit code for whoever started this process.

    A launcher such as torchrun takes any other code than 0 for a failure: it restarts the processes, or it ends the
    others and returns 1 whatever they returned. So a script that restarts and requeues gives the name of a file in
    `OLMO_HF_EXIT_CODE_FILE`, and the processes write into it what they would have returned, and return 0.

    Args:
        code: what this launch ends with.
        told: what this process returns where there is no such file. A launcher that sees another rank than 0 fail
            would end rank 0 before it is done, so the others tell only of errors.
    """
    path = os.environ.get(EXIT_CODE_FILE_VARIABLE)
    if not path:
        return told
    if code != 0:
        write_exit_code(path, code)
    return 0


def write_exit_code(path: str, code: int) -> None:
    """Whole or not at all: several processes of a node write the same."""
    beside = Path(f"{path}.{os.getpid()}")
    beside.write_text(f"{code}\n", encoding="ascii")
    beside.replace(path)


def leave_for_fault(code: int) -> None:
    """End this process at once, because another rank failed with this code."""
    os._exit(for_launcher(code, told=code) if code == USER_ERROR else code)


def _without_traceback(error: OlmoHfError) -> str:
    """What an error says. Torch hands one of a loader's worker on with the traceback written into its words."""
    text = str(error)
    begin = f"{type(error).__module__}.{type(error).__qualname__}: "
    return text.rpartition(begin)[2].strip() if text.startswith("Caught ") and begin in text else text


def open_launch(run: RunArgs, options: Options) -> AbstractContextManager[OpenedRun]:
    """The run directory of this launch, locked, and what to continue from; a dry run only looks."""
    training = run.training
    return open_run(
        run_directory(run),
        resume=training.resume,
        name=run.name,
        dry_run=options.dry_run,
        upload_to=training.upload_to,
        verify_first=options.verify_first,
    )


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
    if problems := rollback_problems(run.callbacks, plan.logging_steps):  # in tokens it is known only now
        raise ConfigError("\n".join(problems))
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
    if with_memory:
        sharding, replicas = launched_sharding(os.environ)
        settings = memory_settings(run, plan, sharding=sharding, replicas=replicas)
        rows += memory_rows(estimate_memory(settings, model.config))
    print_rows(rows)
