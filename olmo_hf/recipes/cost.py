"""How long a run takes on how much hardware, and what it moves: plain proportions of operations, peak and bytes."""

from dataclasses import dataclass

from olmo_hf.recipes.memory import MemorySettings, optimizer_bytes
from olmo_hf.recipes.plan import RunPlan
from olmo_hf.recipes.step_memory import FLOAT32_BYTES

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 24 * SECONDS_PER_HOUR
TOKEN_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}


@dataclass(frozen=True)
class Speed:
    """One speed of a run, said in every way people say it.

    Attributes:
        tokens_per_second: Over all devices.
        hours: For the whole run, without evaluations, checkpoints and pauses.
        utilisation: Share of the peak by the operations of the original (weights and attention), as the metric
            `throughput/device/mfu`.
        utilisation_6n: Share of the peak by six operations per parameter and token, as often quoted.
    """

    tokens_per_second: float
    hours: float
    utilisation: float
    utilisation_6n: float


def speed(plan: RunPlan, *, tokens_per_second: float, peak_flops: float) -> Speed:
    """What a throughput means.

    Args:
        plan: The run.
        tokens_per_second: Over all devices.
        peak_flops: Operations per second of all devices together.
    """
    hours = plan.batch.max_tokens / tokens_per_second / SECONDS_PER_HOUR
    return Speed(
        tokens_per_second,
        hours,
        plan.flops.total * tokens_per_second / peak_flops,
        6 * plan.count.total * tokens_per_second / peak_flops,
    )


def speed_at_utilisation(plan: RunPlan, *, utilisation: float, peak_flops: float) -> Speed:
    """The speed at a utilisation (weights and attention)."""
    return speed(plan, tokens_per_second=utilisation * peak_flops / plan.flops.total, peak_flops=peak_flops)


def speed_for_hours(plan: RunPlan, *, hours: float, peak_flops: float) -> Speed:
    """The speed that a run of so many hours needs."""
    tokens_per_second = plan.batch.max_tokens / (hours * SECONDS_PER_HOUR)
    return speed(plan, tokens_per_second=tokens_per_second, peak_flops=peak_flops)


def total_flops(plan: RunPlan) -> int:
    """Operations of the whole run."""
    return plan.flops.total * plan.batch.max_tokens


def describe_speed(found: Speed) -> str:
    """One line for people."""
    shares = f"{found.utilisation:.1%} of the peak with attention, {found.utilisation_6n:.1%} by 6 per parameter"
    return f"{found.hours:,.1f} h at {found.tokens_per_second:,.0f} tokens/s: {shares}"


def time_rows(plan: RunPlan, found: Speed) -> list[tuple[str, str]]:
    """Rows (label, value): what a speed means for a step, for a day and for the whole run."""
    step_seconds = plan.batch.tokens_per_step / found.tokens_per_second
    days, devices = found.hours / 24, plan.batch.world_size
    return [
        ("step", f"{step_seconds:,.2f} s for {plan.batch.tokens_per_step:,} tokens"),
        ("tokens per day", f"{found.tokens_per_second * SECONDS_PER_DAY:.3e}, {days:,.1f} days for the run"),
        ("device hours", f"{found.hours * devices:,.0f} ({devices:,} devices for {found.hours:,.1f} h)"),
    ]


def data_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Row (label, value): what the whole run reads. Where no type of ids is given, the smallest that holds them."""
    given = plan.run.data.token_dtype
    dtype = given if given is not None else "uint16" if plan.config.vocab_size <= 2**16 else "uint32"
    volume = plan.batch.max_tokens * TOKEN_BYTES[dtype]
    assumed = "" if given is not None else ", assumed"
    return [("data read", f"{volume / 1e9:,.1f} GB ({plan.batch.max_tokens:.3e} tokens in {dtype}{assumed})")]


def checkpoint_rows(plan: RunPlan, *, bytes_per_second: float) -> list[tuple[str, str]]:
    """Rows (label, value): sizes of checkpoints and how long writing takes.

    Args:
        plan: The run.
        bytes_per_second: What the file system takes in from all devices together.
    """
    weights = FLOAT32_BYTES * plan.count.total
    moments = optimizer_bytes(plan.run.training.optimizer, plan.count, plan.config.num_hidden_layers)
    whole, rate = weights + moments, bytes_per_second
    return [
        (
            "checkpoint",
            f"{whole / 1e9:,.2f} GB with the optimizer, {whole / rate:,.0f} s to write at {rate / 1e9:g} GB/s; "
            f"the model alone {weights / 1e9:,.2f} GB, {weights / rate:,.0f} s",
        )
    ]


def exchange_bytes(plan: RunPlan, settings: MemorySettings) -> int:
    """Bytes that each device sends in one step, by ring algorithms.

    Full shard gathers the weights before the forward pass of every micro-batch and those of the layers again before
    the backward pass, shard grad op all of them once a step; both scatter float32 gradients after every micro-batch,
    or once a step when that is deferred. DDP and the replicas of HSDP sum float32 gradients once a step.
    """
    step, total = settings.step, plan.count.total
    passes = plan.batch.gradient_accumulation_steps
    replicas = settings.num_devices // step.shards if step.is_sharded else settings.num_devices
    layers = plan.config.num_hidden_layers * plan.count.per_layer
    gathered = {"full": passes * (total + layers), "grad": total, "none": 0}[step.sharding]
    scatters = 0 if not step.is_sharded else 1 if step.defers_reduction else passes
    part = (step.shards - 1) / step.shards if step.is_sharded else 0.0
    inside = part * (gathered * step.product_bytes + scatters * total * FLOAT32_BYTES)
    held = total / step.shards if step.is_sharded else total
    between = 2 * (replicas - 1) / replicas * held * FLOAT32_BYTES
    return round(inside + between)
