"""`olmo-hf average`: the mean of checkpoints, a model soup."""

import argparse
from pathlib import Path

HELP = "average checkpoints of one architecture (a model soup), with its lineage in the model card"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the verb."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="checkpoints of any kind, or run directories (their newest)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DST", help="directory to write; must not exist")
    parser.add_argument("--weights", type=float, nargs="+", metavar="W", help="how much each counts (default: alike)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the result; left out: that of the checkpoints"
    )
    parser.add_argument("--check", action="store_true", help="only say whether they can be averaged")


def run(namespace: argparse.Namespace) -> int:
    """Checks, averages, writes."""
    import torch

    from olmo_hf.errors import ConversionError
    from olmo_hf.recipes.average import average, open_ingredients

    if namespace.output is None and not namespace.check:
        raise ConversionError("-o: is not given; name the directory to write, or --check to only look")
    ingredients = open_ingredients(namespace.runs, namespace.weights)
    for one in ingredients:
        step = "" if one.step is None else f", step {one.step:,}"
        print(f"{one.given}: {one.checkpoint.kind}{step}, share {one.share:.6g}")
    if namespace.check:
        print("configurations, tensors and tokenizers agree")
        return 0
    dtype = None if namespace.dtype is None else getattr(torch, namespace.dtype)
    for notice in average(ingredients, namespace.output, dtype=dtype):
        print(f"note: {notice}")
    print(f"written: {namespace.output}")
    return 0
