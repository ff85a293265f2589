"""The table of a plan: what `olmo-hf plan` and `train_hf.py --dry_run` print."""

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace

from olmo_hf.args import RunArgs
from olmo_hf.distributed import is_main_process, launched_sharding
from olmo_hf.model.activation_checkpointing import STRATEGIES
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.recipes.memory import Memory, MemorySettings, estimate_memory
from olmo_hf.recipes.plan import learning_rate_rows, plan_run
from olmo_hf.recipes.step_memory import Sharding, StepSettings
from olmo_hf.training.batch_plan import BatchPlan

Row = tuple[str, str]

LEAST_ROOM = 30
"""Columns below which values are not folded: the terminal is too narrow for a table."""


def memory_settings(
    run: RunArgs, batch: BatchPlan, *, sharding: Sharding | None = None, replicas: int = 1
) -> MemorySettings:
    """What the memory of a run depends on beside its model.

    Args:
        run: The settings.
        batch: The plan of its batches.
        sharding: What is spread over the devices. None: everything, where there are several.
        replicas: Groups of devices that share one model each (HSDP).
    """
    training = run.training
    several: Sharding = "full" if batch.world_size > 1 else "none"
    return MemorySettings(
        num_devices=batch.world_size,
        optimizer=training.optimizer,
        step=StepSettings(
            micro_batch=batch.per_device_train_batch_size,
            sequence_length=run.data.sequence_length,
            half=training.bf16 or training.fp16,
            activation_checkpointing=run.model.activation_checkpointing,
            loss_implementation=training.loss_implementation,
            loss_chunk_tokens=training.loss_chunk_tokens,
            sharding=several if sharding is None else sharding,
            shards=batch.world_size // replicas,
            accumulates=batch.gradient_accumulation_steps > 1,
            defers_reduction=training.defer_gradient_reduction,
            layers_per_unit=training.fsdp_layers_per_unit,
        ),
    )


def memory_rows(memory: Memory) -> list[Row]:
    """One row (label, value) in gigabytes of 10^9 bytes."""
    spelled = ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in memory.parts().items())
    return [("memory per device", f"about {memory.total / 1e9:,.1f} GB: {spelled}")]


def alternative_rows(settings: MemorySettings, config: OlmoHfConfig) -> list[Row]:
    """Rows (label, value): the memory with every strategy of recomputation, and with every way to compute the loss."""
    steps = {
        f"activation_checkpointing: {name}": replace(settings.step, activation_checkpointing=value)
        for name, value in [("null", None), *((strategy, strategy) for strategy in STRATEGIES)]
    }
    steps |= {
        f"loss_implementation: {name}": replace(settings.step, loss_implementation=name)
        for name in ("plain", "chunked")
    }
    rows = []
    for label, step in steps.items():
        memory = estimate_memory(replace(settings, step=step), config)
        kept, logits = memory.step.kept_by_layers / 1e9, memory.step.logits_and_rest / 1e9
        rows.append(
            (label, f"about {memory.total / 1e9:,.1f} GB, activations kept {kept:,.2f}, logits and loss {logits:,.2f}")
        )
    return rows


def print_paper_plan(run: RunArgs, *, num_processes: int) -> int:
    """The table of a run whose data, tokenizer and checkpoints may be elsewhere; nothing is built or opened for it.

    Returns:
        Exit code, 0.

    Raises:
        ConfigError: see `plan_run`.
    """
    plan = plan_run(run, num_processes=num_processes)
    sharding, replicas = launched_sharding(os.environ)
    memory = estimate_memory(memory_settings(run, plan.batch, sharding=sharding, replicas=replicas), plan.config)
    if is_main_process():
        print_rows([("name", run.name), *plan.rows(), *learning_rate_rows(plan), *memory_rows(memory)])
    return 0


def print_rows(rows: Sequence[Row]) -> None:
    """Labels in one column, values in the other; on a terminal long values are folded, elsewhere a row is one line."""
    width = max(len(label) for label, _ in rows)
    room = shutil.get_terminal_size().columns - width - 3 if sys.stdout.isatty() else 0
    for label, value in rows:
        lines = textwrap.wrap(value, room, break_on_hyphens=False) if room >= LEAST_ROOM else [value]
        sys.stdout.write(f"{label:<{width}}  " + f"\n{'':<{width}}  ".join(lines) + "\n")
    sys.stdout.flush()
