"""`olmo-hf compare-outputs A B`: where two runs begin to compute something else, module by module."""

import argparse
from pathlib import Path

from olmo_hf.errors import DataError

HELP = "compare what the modules of two runs got and gave at a step (callbacks.model_outputs)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the verb."""
    parser.add_argument("first", type=Path, metavar="A", help="RUN/model-outputs/stepN.safetensors")
    parser.add_argument("second", type=Path, metavar="B", help="the same of another run")
    parser.add_argument("--all", action="store_true", help="also show tensors that are equal")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="relative to the largest value (default: 0)"
    )


def run(namespace: argparse.Namespace) -> int:
    """Prints what differs, in the order of computation. Returns 0 when all agree, 1 otherwise."""
    from olmo_hf.report.outputs import compare_outputs

    if not namespace.tolerance >= 0:
        raise DataError(f"--tolerance: found {namespace.tolerance}, expected 0 or more")
    found = compare_outputs(namespace.first, namespace.second)
    differing = [
        one for one in found if one.note or not (one.is_equal or one.largest <= namespace.tolerance * one.scale)
    ]
    shown = found if namespace.all else differing
    width = max((len(one.name) for one in shown), default=0)
    for one in shown:
        said = one.note if one.note else f"{one.largest:10.3g} of {one.scale:.3g}"
        print(f"{one.name:<{width}}  {said}")
    if not differing:
        print(f"all {len(found)} tensors agree")
        return 0
    print(f"{len(differing)} of {len(found)} tensors differ, the first is {differing[0].name}")
    return 1
