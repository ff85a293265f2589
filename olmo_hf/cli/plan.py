"""`olmo-hf plan`: a run on paper, before anything is bought, downloaded or started."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_hf.errors import ConfigError

if TYPE_CHECKING:
    from olmo_hf.recipes.plan import RunPlan

HELP = "parameters, steps, learning rates, memory per device, time and cost of a run, from its configuration alone"

TAKES_FURTHER_SETTINGS = True

USABLE = 0.9
"""Share of a device's memory that a plan may fill: libraries and fragmentation take some too."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the verb; settings may follow as with train_hf.py."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a run's YAML, ours or the original trainer's")
    parser.add_argument("--num-processes", type=int, default=1, metavar="N", help="devices (default: %(default)s)")
    parser.add_argument(
        "--sharding",
        choices=("auto", "full", "grad", "none"),
        default="auto",
        help="full and grad: FSDP with and without freeing gathered weights; none: DDP (default: full above 1 device)",
    )
    parser.add_argument(
        "--replicas", type=int, default=1, metavar="R", help="groups of devices with a sharded model each (HSDP)"
    )
    parser.add_argument(
        "--device",
        default="H100",
        metavar="NAME",
        help="kind of GPU, such as h100 or h100-80gb to have the memory compared (default: %(default)s)",
    )
    parser.add_argument("--peak-flops", type=float, metavar="X", help="operations per second of a device, if unknown")
    parser.add_argument(
        "--utilisation", type=float, default=0.4, metavar="U", help="share of the peak assumed (default: %(default)s)"
    )
    parser.add_argument(
        "--hours", type=float, nargs="+", default=[], metavar="H", help="speed needed for so long a run"
    )
    parser.add_argument(
        "--write-gb-per-second",
        type=float,
        default=2.0,
        metavar="X",
        help="what the file system takes in from all devices together (default: %(default)s)",
    )
    parser.add_argument(
        "--alternatives", action="store_true", help="memory with every strategy of recomputation and every loss"
    )
    parser.add_argument("--cost-per-device-hour", type=float, metavar="C", help="price of a device for an hour")
    parser.add_argument("--schedule", type=Path, metavar="FILE.png", help="draw the learning rate")
    parser.epilog = "Settings may follow: --training.learning_rate=3e-4."


def run(namespace: argparse.Namespace) -> int:
    """Prints the plan."""
    from olmo_hf.recipes.any_file import load_any_run
    from olmo_hf.recipes.cost import checkpoint_rows, data_rows
    from olmo_hf.recipes.plan import bolt_on_length, learning_rate_rows, plan_run
    from olmo_hf.recipes.table import print_rows

    _check(namespace)
    settings = load_any_run(namespace.config, namespace.further)
    plan = plan_run(settings, num_processes=namespace.num_processes)
    rows = [("name", settings.name), *plan.rows(), *learning_rate_rows(plan)]
    rows += _memory_rows(plan, namespace)
    rows += _time_rows(plan, namespace)
    rows += data_rows(plan) + checkpoint_rows(plan, bytes_per_second=1e9 * namespace.write_gb_per_second)
    print_rows(rows)
    if namespace.schedule is not None:
        from olmo_hf.report.schedule import draw_schedule

        training = settings.training
        try:
            draw_schedule(
                training.scheduler,
                peak_lr=training.learning_rate,
                plan=plan.batch,
                path=namespace.schedule,
                bolt_on=bolt_on_length(training),
                factors=training.learning_rate_factors,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--schedule: {namespace.schedule} cannot be drawn ({error}); name an image file where you may write"
            ) from error
        print(f"\nwrote {namespace.schedule}")
    return 0


def _check(namespace: argparse.Namespace) -> None:
    problems = []
    if namespace.num_processes < 1:
        problems.append(f"--num-processes: found {namespace.num_processes}, expected at least 1")
    elif namespace.replicas < 1 or namespace.num_processes % namespace.replicas:
        problems.append(
            f"--replicas: found {namespace.replicas}, expected a divisor of --num-processes {namespace.num_processes}"
        )
    if namespace.replicas > 1 and namespace.sharding == "none":
        problems.append("--replicas: found with --sharding none; replicas of a model that is not sharded are DDP")
    if not 0 < namespace.utilisation <= 1:
        problems.append(f"--utilisation: found {namespace.utilisation:g}, expected a share such as 0.4")
    if not namespace.write_gb_per_second > 0:
        problems.append(f"--write-gb-per-second: found {namespace.write_gb_per_second:g}, expected more than 0")
    if problems:
        raise ConfigError(problems)


def _memory_rows(plan: "RunPlan", namespace: argparse.Namespace) -> list[tuple[str, str]]:
    from olmo_hf.recipes.cost import exchange_bytes
    from olmo_hf.recipes.memory import estimate_memory
    from olmo_hf.recipes.table import alternative_rows, memory_rows, memory_settings

    sharding = None if namespace.sharding == "auto" else namespace.sharding
    settings = memory_settings(plan.run, plan.batch, sharding=sharding, replicas=namespace.replicas)
    memory = estimate_memory(settings, plan.config)
    rows = memory_rows(memory)
    if (there := _device_bytes(namespace.device)) is not None:
        share = memory.total / there
        verdict = "fits" if share <= USABLE else "does not fit" if share > 1 else "is too close to fit for certain"
        rows.append(("fits", f"{verdict}: {share:.0%} of {there / 1e9:,.0f} GB"))
    if plan.batch.world_size > 1:
        rows.append(("exchanged per step", f"{exchange_bytes(plan, settings) / 1e9:,.2f} GB sent by each device"))
    return rows + (alternative_rows(settings, plan.config) if namespace.alternatives else [])


def _device_bytes(name: str) -> float | None:
    """Memory of a device whose name says it (`h100-80gb`)."""
    found = re.search(r"(\d+)\s*gb\b", name.lower())
    return 1e9 * float(found[1]) if found else None


def _time_rows(plan: "RunPlan", namespace: argparse.Namespace) -> list[tuple[str, str]]:
    from olmo_hf.callbacks.peak_flops import GPU_PEAK_FLOPS, gpu_peak_flops
    from olmo_hf.recipes.cost import (
        describe_speed,
        speed_at_utilisation,
        speed_for_hours,
        time_rows,
        total_flops,
    )

    one = namespace.peak_flops if namespace.peak_flops is not None else gpu_peak_flops(namespace.device)
    if one is None:
        known = ", ".join(sorted(GPU_PEAK_FLOPS))
        raise ConfigError(f"--device: found {namespace.device!r}, expected one of {known}; or give --peak-flops")
    peak = one * plan.batch.world_size
    assumed = speed_at_utilisation(plan, utilisation=namespace.utilisation, peak_flops=peak)
    devices = f"{plan.batch.world_size} x {namespace.device}"
    rows = [
        ("arithmetic of the run", f"{total_flops(plan):.3e} operations; {devices}: {peak:.3e} per second at most"),
        ("time", f"at an assumed {namespace.utilisation:.0%}: {describe_speed(assumed)}"),
        *time_rows(plan, assumed),
    ]
    if namespace.cost_per_device_hour is not None:
        cost = assumed.hours * plan.batch.world_size * namespace.cost_per_device_hour
        rows.append(("cost", f"{cost:,.0f} for {assumed.hours * plan.batch.world_size:,.0f} device hours"))
    for hours in namespace.hours:
        rows.append((f"for {hours:g} h", describe_speed(speed_for_hours(plan, hours=hours, peak_flops=peak))))
    return rows
