"""From the `callbacks` section to an explicit list of callbacks."""

from pathlib import Path

from transformers import TrainerCallback

from olmo_hf import distributed
from olmo_hf.callbacks.args import CallbacksArgs, callbacks_problems, rollback_problems
from olmo_hf.callbacks.cancellation import Cancellation
from olmo_hf.callbacks.console import Console
from olmo_hf.callbacks.data_indices import DataIndices
from olmo_hf.callbacks.evaluation import EvaluationSchedule
from olmo_hf.callbacks.garbage_collector import GarbageCollector
from olmo_hf.callbacks.heartbeat import Heartbeat
from olmo_hf.callbacks.loss_spike import LossSpike
from olmo_hf.callbacks.memory import Memory
from olmo_hf.callbacks.metrics_file import MetricsFile
from olmo_hf.callbacks.model_outputs import ModelOutputs
from olmo_hf.callbacks.profiler import Profiler
from olmo_hf.callbacks.speed_monitor import SpeedMonitor
from olmo_hf.callbacks.trackers import prepare_trackers
from olmo_hf.callbacks.upload import Upload
from olmo_hf.errors import ConfigError
from olmo_hf.training.batch_plan import BatchPlan


def build_callbacks(
    args: CallbacksArgs,
    *,
    run_dir: Path,
    plan: BatchPlan,
    evaluates: bool,
    evaluates_on_load: bool = False,
    flops_per_token: int | None = None,
) -> list[TrainerCallback]:
    """Callbacks in the order they are called; trackers (`report_to`) are told which run they belong to.

    Args:
        run_dir: directory of the run.
        flops_per_token: model FLOPs per token, forward and backward. None: no MFU.
        plan: lengths and intervals of this launch.
        evaluates: whether there are evaluators to run.
        evaluates_on_load: whether they also run before the first step.

    Raises:
        ConfigError: a setting out of range; all problems at once.
    """
    problems = [*callbacks_problems(args), *rollback_problems(args, plan.logging_steps)]
    if problems:
        raise ConfigError(problems)
    prepare_trackers(run_dir)
    record = MetricsFile(run_dir)
    cancellation = _cancellation(args, run_dir=run_dir, plan=plan, record=record)
    rank = distributed.rank()
    wanted: list[TrainerCallback | None] = [
        Memory(args.memory) if args.memory is not None else None,
        GarbageCollector(args.garbage_collector) if args.garbage_collector is not None else None,
        Heartbeat(args.heartbeat, run_dir=run_dir, rank=rank) if args.heartbeat is not None else None,
        record,
        Console(args.console, last_step=plan.stop_step, cancellation=cancellation)
        if args.console is not None
        else None,
        LossSpike(args.loss_spike, record.event, run_dir=run_dir, rank=rank) if args.loss_spike is not None else None,
        Upload(args.upload, run_dir=run_dir) if args.upload is not None else None,
        ModelOutputs(args.model_outputs, run_dir=run_dir) if args.model_outputs is not None else None,
        Profiler(args.profiler, run_dir=run_dir) if args.profiler is not None else None,
        EvaluationSchedule(plan.eval_interval_steps, plan.stop_step, on_load=evaluates_on_load) if evaluates else None,
        # After those that ask for checkpoints and evaluations: when the run is being stopped it takes them back.
        cancellation,
        # After all that ask for checkpoints: before one it writes what it has.
        DataIndices(args.data_indices, run_dir=run_dir, rank=rank) if args.data_indices is not None else None,
        # Last: what the others do in a hook belongs to the phase which that hook ends.
        SpeedMonitor(args.speed_monitor, flops_per_token=flops_per_token, last_step=plan.stop_step)
        if args.speed_monitor is not None
        else None,
    ]
    return [callback for callback in wanted if callback is not None]


def _cancellation(args: CallbacksArgs, *, run_dir: Path, plan: BatchPlan, record: MetricsFile) -> Cancellation | None:
    if args.cancellation is None:
        return None
    return Cancellation(
        args.cancellation,
        run_dir=run_dir,
        last_step=plan.stop_step,
        early_stopping_after_steps=plan.warmup.steps,
        record=record.event,
    )
