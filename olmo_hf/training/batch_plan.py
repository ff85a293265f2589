"""From what the user asked for to what will run: batch sizes, accumulation, steps, tokens. Pure, and torch-free."""

from dataclasses import dataclass
from typing import Any

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs, TrainingArgs
from olmo_hf.training.durations import (
    Interval,
    SaveIntervals,
    duration_in_steps,
    duration_in_tokens,
    interval_in_steps,
    save_interval,
)
from olmo_hf.training.schedulers import HORIZONLESS
from olmo_hf.wording import counted

MOST_INSTANCES = 2**48
"""Places in the order of a run. Far beyond it, lengths are no longer numbers that Python takes for one."""


@dataclass(frozen=True)
class Length:
    """A point of the run on both clocks."""

    steps: int
    """Optimizer steps since the start of the run."""

    tokens: int
    """Tokens trained on since the start of the run."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """What one step is made of and how long the run is. What is printed at the start is what runs."""

    per_device_train_batch_size: int
    """Instances of one forward pass on one device."""

    gradient_accumulation_steps: int
    """Forward passes per device and optimizer step."""

    global_train_batch_size: int
    """Instances per optimizer step over all devices."""

    world_size: int
    """Number of devices."""

    tokens_per_step: int
    """Tokens per optimizer step over all devices."""

    steps_per_epoch: int
    """Whole global batches in the data; the rest of the instances is left out of the epoch."""

    max_steps: int
    """Step at which the run is complete (from `max_duration`)."""

    max_tokens: int
    """Tokens at which the run is complete (from `max_duration`)."""

    stop_step: int
    """Last step of this launch: the first of `max_steps`, `stop_at` and `step + stop_after`."""

    start: Length
    """Where this launch begins."""

    warmup: Length
    """End of the learning rate's warm-up."""

    horizon: Length | None
    """Where the learning rate reaches its floor; None where the curve has none."""

    logging_steps: int
    """Steps between two logged ones."""

    save_intervals: SaveIntervals
    """Steps or minutes between checkpoints of each kind."""

    eval_interval_steps: int | None
    """Steps between evaluations; None is never."""


def tokens_after(plan: BatchPlan, step: int) -> int:
    """Tokens seen after a step of this launch; before its start, as if it had always had this batch."""
    return max(plan.start.tokens + (step - plan.start.steps) * plan.tokens_per_step, 0)


def bolt_on_start(scheduler: SchedulerArgs, plan: BatchPlan) -> int:
    """Clock, in the schedule's units, at which a second warm-up of this launch begins."""
    return plan.start.steps if scheduler.units == "steps" else plan.start.tokens


def plan_batches(
    training: TrainingArgs,
    *,
    world_size: int,
    sequence_length: int,
    num_instances: int,
    step: int = 0,
    tokens_seen: int = 0,
    eval_interval: int | str | None = None,
) -> BatchPlan:
    """Works out the batch and the length of the run.

    With `stop_at` unset the run ends exactly at `max_duration`. The original trainer then takes up to ten further
    steps at the final learning rate; whoever wants those asks for a longer `max_duration` and sets `scheduler.t_max`.

    Args:
        training: the `training` section.
        world_size: number of devices.
        sequence_length: tokens per instance.
        num_instances: instances in the training data.
        step, tokens_seen: optimizer steps already taken and tokens already trained on (a resumed run).
        eval_interval: the evaluation section's interval, to be turned into steps as well.

    Raises:
        ConfigError: carries every problem found: sizes that do not divide, data smaller than one batch, lengths that
            are none.
    """
    problems = _batch_problems(training, world_size=world_size, num_instances=num_instances)
    problems += _length_problems(training)
    if problems:
        raise ConfigError(problems)

    global_batch = global_batch_size(training, world_size)
    tokens_per_step = global_batch * sequence_length
    steps_per_epoch = num_instances // global_batch
    units: dict[str, Any] = {"tokens_per_step": tokens_per_step, "steps_per_epoch": steps_per_epoch}
    max_steps, max_tokens = (
        measure(training.max_duration, step=step, tokens_seen=tokens_seen, **units)
        for measure in (duration_in_steps, duration_in_tokens)
    )
    _require_countable(training, max_steps * global_batch)
    start, end = Length(step, tokens_seen), Length(max_steps, max_tokens)
    return BatchPlan(
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=global_batch // (world_size * training.per_device_train_batch_size),
        global_train_batch_size=global_batch,
        world_size=world_size,
        tokens_per_step=tokens_per_step,
        steps_per_epoch=steps_per_epoch,
        max_steps=max_steps,
        max_tokens=max_tokens,
        stop_step=_stop_step(training, max_steps, step),
        start=start,
        warmup=_warmup_end(training.scheduler, start, tokens_per_step),
        horizon=_horizon(training.scheduler, start, end, tokens_per_step),
        logging_steps=duration_in_steps(training.logging_steps, key="training.logging_steps", **units),
        save_intervals=_save_intervals(training, **units),
        eval_interval_steps=interval_in_steps(eval_interval, key="evaluation.interval", **units),
    )


def _require_countable(training: TrainingArgs, num_instances: int) -> None:
    if num_instances > MOST_INSTANCES:
        raise ConfigError(
            f"training.max_duration is {training.max_duration!r}, which is longer than any run ({num_instances:,} "
            "instances); write a shorter one"
        )


def _stop_step(training: TrainingArgs, max_steps: int, step: int) -> int:
    """Where this launch ends: at the end of the run or, if that is earlier, where `stop_at` or `stop_after` says."""
    stops = [max_steps, training.stop_at, None if training.stop_after is None else step + training.stop_after]
    return min(stop for stop in stops if stop is not None)


def global_batch_size(training: TrainingArgs, world_size: int) -> int:
    """Instances per optimizer step over all devices; without a setting, one pass of every device."""
    if training.global_train_batch_size is None:
        return training.per_device_train_batch_size * world_size
    return training.global_train_batch_size


def _save_intervals(training: TrainingArgs, **units: int) -> SaveIntervals:
    return SaveIntervals(
        permanent=save_interval(training.save_interval, key="training.save_interval", **units),
        ephemeral=save_interval(training.save_interval_ephemeral, key="training.save_interval_ephemeral", **units),
        unsharded=save_interval(training.save_interval_unsharded, key="training.save_interval_unsharded", **units),
    )


def _length_problems(training: TrainingArgs) -> list[str]:
    problems = []
    if training.max_duration is None:
        problems.append(
            'training.max_duration is not set: say how long to train, e.g. 1000 (steps), "1ep" or "5e9T" (tokens)'
        )
    for key in ("stop_at", "stop_after"):
        value = getattr(training, key)
        if value is not None and value < 1:
            problems.append(f"training.{key} is {value}, but must be at least 1: leave it out to run to max_duration")
    return problems


def _batch_problems(training: TrainingArgs, *, world_size: int, num_instances: int) -> list[str]:
    per_device = training.per_device_train_batch_size
    if per_device < 1:
        return [f"training.per_device_train_batch_size is {per_device}, but must be at least 1"]
    global_batch = global_batch_size(training, world_size)
    if global_batch < 1:
        return [f"training.global_train_batch_size is {global_batch}, but must be at least 1"]
    problems = []
    per_pass = world_size * per_device
    if global_batch % per_pass != 0:
        below, above = global_batch // per_pass * per_pass, -(-global_batch // per_pass) * per_pass
        sizes = f"{below} or {above}" if below > 0 else f"{above}"
        problems.append(
            f"training.global_train_batch_size is {global_batch}, which {world_size} devices x "
            f"per_device_train_batch_size {per_device} = {per_pass} instances per pass do not divide: "
            f"set global_train_batch_size to {sizes}{_fitting_per_device(global_batch, world_size, per_device)}"
        )
    if num_instances < global_batch:
        problems.append(
            f"the training data has {num_instances:,} instances, fewer than one batch of {global_batch:,} "
            "(training.global_train_batch_size): lower the batch size or data.sequence_length, or add data"
        )
    return problems


def _fitting_per_device(global_batch: int, world_size: int, per_device: int) -> str:
    """The end of the remedy: micro-batch sizes near the one asked for that divide the batch."""
    if global_batch % world_size != 0:
        return f" (with {world_size} devices it must be a multiple of {world_size})"
    device_batch = global_batch // world_size
    divisors = [size for size in range(1, device_batch + 1) if device_batch % size == 0]
    below = [size for size in divisors if size < per_device][-1:]
    above = [size for size in divisors if size > per_device][:1]
    return f", or per_device_train_batch_size to {' or '.join(str(size) for size in below + above)}"


def _point(amount: float, units: str, start: Length, tokens_per_step: int) -> Length:
    """A point of the schedule on both clocks, the batch size staying what it is now."""
    if units == "steps":
        steps = int(amount)
        return Length(steps, max(start.tokens + (steps - start.steps) * tokens_per_step, 0))
    tokens = int(amount)
    return Length(max(start.steps + -(-(tokens - start.tokens) // tokens_per_step), 0), tokens)


def _warmup_end(scheduler: SchedulerArgs, start: Length, tokens_per_step: int) -> Length:
    warmup = 0.0 if scheduler.name == "constant" else scheduler.warmup
    return _point(warmup, scheduler.units, start, tokens_per_step)


def _horizon(scheduler: SchedulerArgs, start: Length, end: Length, tokens_per_step: int) -> Length | None:
    if scheduler.name in HORIZONLESS:
        return None
    return end if scheduler.t_max is None else _point(scheduler.t_max, scheduler.units, start, tokens_per_step)


def describe(plan: BatchPlan) -> list[tuple[str, str]]:
    """Rows (label, value) of the table printed at the start; every length in steps and in tokens."""

    def both(length: Length) -> str:
        return f"{counted(length.steps, 'step')} = {length.tokens:,} tokens"

    def every(interval: Interval | None) -> str:
        if interval is None:
            return "never"
        if interval.steps is None:
            return f"{interval.minutes:,} minutes"
        return f"{counted(interval.steps, 'step')} = {interval.steps * plan.tokens_per_step:,} tokens"

    stop_tokens = plan.start.tokens + (plan.stop_step - plan.start.steps) * plan.tokens_per_step
    passes = (
        f"{counted(plan.world_size, 'device')} x {counted(plan.per_device_train_batch_size, 'instance')} x "
        f"{counted(plan.gradient_accumulation_steps, 'accumulation step')}"
    )
    return [
        (
            "batch",
            f"{counted(plan.global_train_batch_size, 'instance')} = {plan.tokens_per_step:,} tokens ({passes})",
        ),
        ("epoch", both(Length(plan.steps_per_epoch, plan.steps_per_epoch * plan.tokens_per_step))),
        ("run", both(Length(plan.max_steps, plan.max_tokens))),
        ("this launch starts after", both(plan.start)),
        ("this launch stops at", both(Length(plan.stop_step, stop_tokens))),
        ("warm-up ends at", both(plan.warmup)),
        ("learning rate is at its floor from", "never" if plan.horizon is None else both(plan.horizon)),
        ("log every", every(Interval(plan.logging_steps))),
        ("save every", every(plan.save_intervals.permanent)),
        ("save ephemeral every", every(plan.save_intervals.ephemeral)),
        ("save unsharded every", every(plan.save_intervals.unsharded)),
        ("evaluate every", every(None if plan.eval_interval_steps is None else Interval(plan.eval_interval_steps))),
        *(("note", warning) for warning in plan_warnings(plan)),
    ]


def plan_warnings(plan: BatchPlan) -> list[str]:
    """What is allowed but rarely meant, one sentence each: a schedule that does not end where the run does."""
    warnings = []
    if plan.horizon is not None and plan.horizon.steps != plan.max_steps:
        where = "before" if plan.horizon.steps < plan.max_steps else "after"
        warnings.append(
            f"the learning rate reaches its floor at step {plan.horizon.steps:,} ({plan.horizon.tokens:,} tokens), "
            f"{where} the run ends at step {plan.max_steps:,} ({plan.max_tokens:,} tokens): "
            "leave training.scheduler.t_max out if the two should agree"
        )
    if plan.stop_step < plan.max_steps:
        warnings.append(
            f"this launch stops at step {plan.stop_step:,} of {plan.max_steps:,} (training.stop_at, stop_after); "
            "the schedule is that of the whole run"
        )
    if plan.warmup.steps >= plan.max_steps:
        warnings.append(
            f"the warm-up ends at step {plan.warmup.steps:,}, not before the run does (step {plan.max_steps:,}): "
            "the learning rate never reaches its peak; shorten training.scheduler.warmup"
        )
    return warnings
