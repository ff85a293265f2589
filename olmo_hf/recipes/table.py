"""The table of a plan: what `olmo-hf plan` and `train_hf.py --dry_run` print."""

import sys
from collections.abc import Sequence

from olmo_hf.args import RunArgs
from olmo_hf.distributed import is_main_process
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import count_parameters
from olmo_hf.recipes.activations import kept_bytes
from olmo_hf.recipes.memory import Memory, MemorySettings, Sharding, estimate_memory
from olmo_hf.recipes.plan import learning_rate_rows, plan_run
from olmo_hf.training.batch_plan import BatchPlan

Row = tuple[str, str]


def memory_of(run: RunArgs, config: OlmoHfConfig, batch: BatchPlan, *, sharding: Sharding | None = None) -> Memory:
    """Memory of one device.

    Args:
        run: The settings.
        config: The architecture.
        batch: The plan of its batches.
        sharding: What is spread over the devices. None: everything, where there are several.
    """
    training, length = run.training, run.data.sequence_length
    half = training.bf16 or training.fp16
    kept = kept_bytes(
        config, sequence_length=length, bf16=half, activation_checkpointing=run.model.activation_checkpointing
    )
    several: Sharding = "full" if batch.world_size > 1 else "none"
    settings = MemorySettings(
        num_devices=batch.world_size,
        sharding=several if sharding is None else sharding,
        optimizer=training.optimizer,
        bf16=half,
        loss_implementation="chunked" if training.loss_implementation == "auto" else training.loss_implementation,
        loss_chunk_tokens=training.loss_chunk_tokens,
        micro_batch_tokens=batch.per_device_train_batch_size * length,
    )
    return estimate_memory(
        settings,
        count_parameters(config),
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        activation_bytes=kept.per_instance * batch.per_device_train_batch_size,
        kept_copies_bytes=kept.weight_copies,
    )


def memory_rows(memory: Memory) -> list[Row]:
    """One row (label, value) in gigabytes of 10^9 bytes."""
    parts = {
        "weights": memory.weights,
        "copies of weights": memory.weight_copies,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
    }
    spelled = ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in parts.items())
    return [("memory per device", f"about {memory.total / 1e9:,.1f} GB: {spelled}")]


def print_paper_plan(run: RunArgs, *, num_processes: int) -> int:
    """The table of a run whose data, tokenizer and checkpoints may be elsewhere; nothing is built or opened for it.

    Returns:
        Exit code, 0.

    Raises:
        ConfigError: see `plan_run`.
    """
    plan = plan_run(run, num_processes=num_processes)
    memory = memory_of(run, plan.config, plan.batch)
    if is_main_process():
        print_rows([("name", run.name), *plan.rows(), *learning_rate_rows(plan), *memory_rows(memory)])
    return 0


def print_rows(rows: Sequence[Row]) -> None:
    """Labels in one column, values in the other."""
    width = max(len(label) for label, _ in rows)
    sys.stdout.write("".join(f"{label:<{width}}  {value}\n" for label, value in rows))
    sys.stdout.flush()
