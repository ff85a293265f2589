"""How long a run takes on how much hardware: plain proportions of operations, peak and utilisation."""

from dataclasses import dataclass

from olmo_hf.recipes.plan import RunPlan

SECONDS_PER_HOUR = 3600.0


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
