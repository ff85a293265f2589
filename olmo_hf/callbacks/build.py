"""From the `callbacks` section to an explicit list of callbacks."""

from pathlib import Path

from transformers import TrainerCallback

from olmo_hf import distributed
from olmo_hf.callbacks.args import CallbacksArgs, callbacks_problems
from olmo_hf.callbacks.console import Console
from olmo_hf.callbacks.data_indices import DataIndices
from olmo_hf.callbacks.ephemeral_checkpoints import EphemeralCheckpoints
from olmo_hf.callbacks.evaluation import EvaluationSchedule
from olmo_hf.callbacks.garbage_collector import GarbageCollector
from olmo_hf.callbacks.metrics_file import MetricsFile
from olmo_hf.callbacks.speed_monitor import SpeedMonitor
from olmo_hf.errors import ConfigError
from olmo_hf.training.batch_plan import BatchPlan


def build_callbacks(
    args: CallbacksArgs,
    *,
    run_dir: Path,
    plan: BatchPlan,
    evaluates: bool,
    flops_per_token: int | None = None,
) -> list[TrainerCallback]:
    """Callbacks in the order they are called.

    Args:
        run_dir: directory of the run.
        flops_per_token: model FLOPs per token, forward and backward. None: no MFU.
        plan: lengths and intervals of this launch.
        evaluates: whether there are evaluators to run.

    Raises:
        ConfigError: a setting out of range; all problems at once.
    """
    problems = callbacks_problems(args)
    if problems:
        raise ConfigError(problems)
    callbacks: list[TrainerCallback] = []
    # The speed monitor comes first: its clock then does not count the others twice.
    if args.speed_monitor is not None:
        callbacks.append(SpeedMonitor(args.speed_monitor, flops_per_token=flops_per_token, last_step=plan.stop_step))
    if args.garbage_collector is not None:
        callbacks.append(GarbageCollector(args.garbage_collector))
    callbacks.append(MetricsFile(run_dir))
    if args.console is not None:
        callbacks.append(Console(args.console, last_step=plan.stop_step))
    if evaluates:
        callbacks.append(EvaluationSchedule(plan.eval_interval_steps, plan.stop_step))
    if plan.save_interval_ephemeral_steps is not None:
        callbacks.append(EphemeralCheckpoints(plan.save_interval_ephemeral_steps))
    # Last: it writes when one of the others, or the trainer, has asked for a checkpoint.
    if args.data_indices is not None:
        callbacks.append(DataIndices(args.data_indices, run_dir=run_dir, rank=distributed.rank()))
    return callbacks
