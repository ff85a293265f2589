"""Numbers, durations and moments as a person reads and writes them."""

import datetime

from olmo_hf.errors import ConfigError


def short_number(value: float) -> str:
    """Four significant digits at most, with `k`, `M`, `B`, `T` above a thousand."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.3g}{suffix}"
    return f"{value:.4g}"


def counted(number: int, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """`42s`, `3m07s`, `5h12m` or `6d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def moment_of(deadline: str) -> float:
    """Seconds since 1970 of `callbacks.cancellation.deadline`; without a zone, the machine's own time is meant.

    Raises:
        ConfigError: it is no moment.
    """
    try:
        return datetime.datetime.fromisoformat(deadline).timestamp()
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"callbacks.cancellation.deadline is {deadline!r}, which is no moment; "
            "write it as 2026-11-30T06:00:00+00:00."
        ) from error
