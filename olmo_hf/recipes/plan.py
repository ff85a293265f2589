"""A run on paper: what it trains, for how long and on what, without its data, its weights or a GPU."""

import math
from dataclasses import dataclass
from pathlib import Path

from olmo_hf.args import RunArgs
from olmo_hf.data.args import DataArgs
from olmo_hf.data.checks import mix_of, resolve_files
from olmo_hf.data.mixes import read_mix
from olmo_hf.data.remote import is_remote
from olmo_hf.data.token_files import num_instances, open_token_files, token_dtype
from olmo_hf.errors import CheckpointError, ConfigError, DataError
from olmo_hf.model.build import build_config, load_tokenizer
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import FlopsPerToken, ParameterCount, count_parameters, describe_model, flops_per_token
from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.batch_plan import (
    BatchPlan,
    bolt_on_start,
    describe,
    global_batch_size,
    plan_batches,
    tokens_after,
)
from olmo_hf.training.durations import parse_duration
from olmo_hf.training.schedulers import LearningRateCurve, learning_rate_curve
from olmo_hf.training.state import RunState, load_run_state

_NEEDS_DATA = ("epoch",)
"""Rows of the table that say nothing when the size of the data is not known."""


@dataclass(frozen=True)
class RunPlan:
    """What is known of a run before it starts.

    Attributes:
        run: Its settings.
        config: Its architecture.
        count: Parameters.
        flops: Operations per token.
        batch: Batch, steps, lengths.
        data_note: Where the number of instances comes from.
        knows_data: Whether it is known at all.
    """

    run: RunArgs
    config: OlmoHfConfig
    count: ParameterCount
    flops: FlopsPerToken
    batch: BatchPlan
    data_note: str
    knows_data: bool

    def rows(self) -> list[tuple[str, str]]:
        """The table (label, value)."""
        rows = [*describe_model(self.config, self.run.data.sequence_length), *describe(self.batch)]
        if not self.knows_data:
            rows = [row for row in rows if row[0] not in _NEEDS_DATA]
        return [*rows, ("data", self.data_note)]


def plan_run(run: RunArgs, *, num_processes: int) -> RunPlan:
    """Plans a run.

    Local data are opened, remote ones are not asked for: of a named mix the published number of tokens is taken. A
    tokenizer is read only where it lies on this machine, and so are the counters of a checkpoint named in
    `training.resume`; without them the run is taken to start at step 0.

    Raises:
        ConfigError: The settings do not fit together, or the length is in epochs of data that are not known.
    """
    sequence_length = run.data.sequence_length
    tokenizer = None
    if run.model.tokenizer is None or Path(run.model.tokenizer).exists():
        tokenizer = load_tokenizer(run.model, model_max_length=sequence_length)
    config = build_config(run.model, tokenizer=tokenizer, max_position_embeddings=sequence_length)
    instances, note = known_instances(run.data)
    if instances is None and parse_duration(run.training.max_duration).unit == "epochs":
        raise ConfigError(
            f"training.max_duration: found {run.training.max_duration!r}, but the length of an epoch is not known: "
            f"{note}; give the length in steps or tokens, or bring the data"
        )
    start = _known_start(run.training)
    batch = plan_batches(
        run.training,
        step=start.step,
        tokens_seen=start.tokens,
        world_size=num_processes,
        sequence_length=sequence_length,
        num_instances=global_batch_size(run.training, num_processes) if instances is None else instances,
        eval_interval=run.evaluation.interval,
    )
    flops = flops_per_token(config, sequence_length)
    return RunPlan(run, config, count_parameters(config), flops, batch, note, instances is not None)


def _known_start(training: TrainingArgs) -> RunState:
    """Where the checkpoint named in `resume` stands, if it is one of ours and on this machine."""
    if training.resume in ("auto", "never") or training.reset_trainer_state or is_remote(training.resume):
        return RunState()
    try:
        return load_run_state(Path(training.resume))
    except CheckpointError:
        return RunState()


def known_instances(args: DataArgs) -> tuple[int | None, str]:
    """Instances of an epoch without asking another machine, and how they are known."""
    remote = [path for path in args.paths if is_remote(path)]
    remote += [path for source in args.sources.values() for path in source.paths if is_remote(path)]
    if args.mix is not None and (args.mix_base is None or is_remote(args.mix_base)):
        mix = read_mix(args.mix)
        count = mix.num_tokens // args.sequence_length
        said = f"mix {mix.name}: {len(mix.relative_paths):,} files, about {mix.num_tokens:,} tokens as published"
        return count, f"{said}; not looked at"
    if remote:
        return None, f"{remote[0]} and others are on another machine; not looked at"
    try:
        files = resolve_files(args)
        opened, problems = open_token_files(files.paths, token_dtype(files.token_dtype))
        if problems:
            return None, problems[0]
        counts = [num_instances(opened[p].num_tokens, args.sequence_length, args.sequence_length) for p in files.paths]
        total = sum(source.taken for source in mix_of(args, files, counts)) if files.source_sizes else sum(counts)
    except DataError as error:
        return None, str(error)
    return total, f"{len(files.paths):,} files on this machine, {total:,} instances"


def curve_of(plan: RunPlan) -> LearningRateCurve:
    """Learning rate by (step, tokens)."""
    training, batch = plan.run.training, plan.batch
    bolt_on = bolt_on_length(training)
    return learning_rate_curve(
        training.scheduler,
        peak_lr=training.learning_rate,
        max_steps=batch.max_steps,
        max_tokens=batch.max_tokens,
        bolt_on_start=bolt_on_start(training.scheduler, batch) if bolt_on > 0 else None,
        bolt_on_length=bolt_on,
    )


def bolt_on_length(training: TrainingArgs) -> float:
    """Length of the second warm-up, 0.0 where there is none: it follows a reset of the optimizer only."""
    return training.bolt_on_warmup if training.reset_optimizer else 0.0


def milestones(batch: BatchPlan) -> list[int]:
    """Steps at which the learning rate is worth printing: warm-up and quarters of the run that is to come."""
    warmup = batch.warmup.steps
    steps = {batch.start.steps + 1, *(math.ceil(quarter * batch.max_steps / 4) for quarter in (1, 2, 3, 4))}
    if warmup > 1:
        steps |= {(warmup + 2) // 2, warmup}
    return sorted(step for step in steps if batch.start.steps < step <= batch.max_steps)


def learning_rate_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Rows (label, value): the learning rate at the milestones."""
    curve, batch = curve_of(plan), plan.batch
    rates = [f"{curve(step, tokens_after(batch, step)):.3e} at {step:,}" for step in milestones(batch)]
    rows = [("learning rate", ", ".join(rates))]
    factors = plan.run.training.learning_rate_factors
    if factors:
        rows.append(("times a factor", ", ".join(f"{pattern}: {factor:g}" for pattern, factor in factors.items())))
    return rows
