"""`olmo-hf plan`: a run on paper, before anything is bought, downloaded or started."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_hf.errors import ConfigError

if TYPE_CHECKING:
    from olmo_hf.recipes.plan import RunPlan

HELP = "parameters, steps, learning rates, memory per device, time and cost of a run, from its configuration alone"

TAKES_FURTHER_SETTINGS = True


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
    parser.add_argument("--device", default="H100", metavar="NAME", help="kind of GPU (default: %(default)s)")
    parser.add_argument("--peak-flops", type=float, metavar="X", help="operations per second of a device, if unknown")
    parser.add_argument(
        "--utilisation", type=float, default=0.4, metavar="U", help="share of the peak assumed (default: %(default)s)"
    )
    parser.add_argument(
        "--hours", type=float, nargs="+", default=[], metavar="H", help="speed needed for so long a run"
    )
    parser.add_argument("--cost-per-device-hour", type=float, metavar="C", help="price of a device for an hour")
    parser.add_argument("--schedule", type=Path, metavar="FILE.png", help="draw the learning rate")
    parser.epilog = "Settings may follow: --training.learning_rate=3e-4."


def run(namespace: argparse.Namespace) -> int:
    """Prints the plan."""
    from olmo_hf.recipes.any_file import load_any_run
    from olmo_hf.recipes.plan import bolt_on_length, learning_rate_rows, plan_run
    from olmo_hf.recipes.table import memory_of, memory_rows, print_rows

    if namespace.num_processes < 1:
        raise ConfigError(f"--num-processes: found {namespace.num_processes}, expected at least 1")
    settings = load_any_run(namespace.config, namespace.further)
    plan = plan_run(settings, num_processes=namespace.num_processes)
    rows = [("name", settings.name), *plan.rows(), *learning_rate_rows(plan)]
    sharding = None if namespace.sharding == "auto" else namespace.sharding
    rows += memory_rows(memory_of(settings, plan.config, plan.batch, sharding=sharding))
    rows += _time_rows(plan, namespace)
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
            raise ConfigError(f"--schedule: {namespace.schedule} cannot be drawn: {error}") from error
        print(f"\nwrote {namespace.schedule}")
    return 0


def _time_rows(plan: "RunPlan", namespace: argparse.Namespace) -> list[tuple[str, str]]:
    from olmo_hf.callbacks.peak_flops import GPU_PEAK_FLOPS, gpu_peak_flops
    from olmo_hf.recipes.cost import describe_speed, speed_at_utilisation, speed_for_hours, total_flops

    one = namespace.peak_flops if namespace.peak_flops is not None else gpu_peak_flops(namespace.device)
    if one is None:
        known = ", ".join(sorted(GPU_PEAK_FLOPS))
        raise ConfigError(f"--device: found {namespace.device!r}, expected one of {known}; or give --peak-flops")
    peak = one * plan.batch.world_size
    assumed = speed_at_utilisation(plan, utilisation=namespace.utilisation, peak_flops=peak)
    devices = f"{plan.batch.world_size} x {namespace.device}"
    rows = [
        ("arithmetic of the run", f"{total_flops(plan):.3e} operations; {devices}: {peak:.3e} per second at most"),
        ("time", describe_speed(assumed)),
    ]
    if namespace.cost_per_device_hour is not None:
        cost = assumed.hours * plan.batch.world_size * namespace.cost_per_device_hour
        rows.append(("cost", f"{cost:,.0f} for {assumed.hours * plan.batch.world_size:,.0f} device hours"))
    for hours in namespace.hours:
        rows.append((f"for {hours:g} h", describe_speed(speed_for_hours(plan, hours=hours, peak_flops=peak))))
    return rows
