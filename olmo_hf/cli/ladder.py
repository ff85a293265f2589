"""`olmo-hf ladder`: the original's ladder of small runs, and the scaling law of those that have ended."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_hf.errors import ConfigError, DataError

if TYPE_CHECKING:
    from olmo_hf.recipes.ladder import Rung
    from olmo_hf.recipes.scaling_law import Point, ScalingLaw

HELP = "configurations of the original's scaling ladder; fit and plot of loss against size and tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the two parts of the verb."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")
    configs = parts.add_parser("configs", help="print the runs of a ladder, and write their configurations")
    configs.add_argument(
        "--sizes",
        nargs="+",
        default=["150M", "300M", "530M", "750M", "1B"],
        metavar="SIZE",
        help="4M to 7B, or WIDTHxLAYERSxHEADS (default: 150M 300M 530M 750M 1B)",
    )
    configs.add_argument(
        "--multiples",
        nargs="+",
        type=float,
        default=[1.0, 2.0, 5.0, 10.0],
        metavar="K",
        help="lengths in units of 20 tokens per parameter, Chinchilla multiples (default: 1 2 5 10)",
    )
    configs.add_argument(
        "--base",
        type=Path,
        metavar="CONFIG.yaml",
        help="a run of ours from which data, tokenizer, evaluation and the kind of model are taken "
        "(default: those of the original's ladder)",
    )
    configs.add_argument(
        "--batch-multiple",
        type=int,
        default=32,
        metavar="N",
        help="global batches are multiples of so many instances (default: %(default)s)",
    )
    configs.add_argument("-o", "--output", type=Path, metavar="DIR", help="write one YAML per run there")
    configs.add_argument(
        "--launch-file",
        metavar="FILE",
        help="of accelerate_configs/ (default: ddp.yaml; fsdp2_shard_grad_op.yaml from 5 billion parameters on)",
    )
    configs.add_argument("--force", action="store_true", help="replace files that are there")
    _add_fit(parts.add_parser("fit", help="fit and plot loss against size and tokens from finished runs"))


def _add_fit(fit: argparse.ArgumentParser) -> None:
    fit.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    fit.add_argument(
        "--metric",
        metavar="NAME",
        help="of metrics.jsonl, such as eval/held-out/CrossEntropyLoss (default: the training loss at the end)",
    )
    fit.add_argument(
        "--predict",
        nargs="+",
        default=[],
        metavar="N,D",
        help="also say the loss of N parameters and D tokens: 7e9,4e12",
    )
    fit.add_argument("-o", "--output-dir", type=Path, default=Path("."), help="gets scaling.png and scaling.json")
    fit.add_argument("--unfinished", action="store_true", help="take runs that did not come to their planned end")


def run(namespace: argparse.Namespace) -> int:
    """Prints, writes or fits."""
    return write_configs(namespace) if namespace.part == "configs" else fit(namespace)


def write_configs(namespace: argparse.Namespace) -> int:
    """The table of the ladder and, with `-o`, its files."""
    from omegaconf import OmegaConf

    from olmo_hf.config_file import run_from_tree
    from olmo_hf.recipes import ladder
    from olmo_hf.settings.source import read_yaml

    base = ladder.BASE if namespace.base is None else read_yaml(namespace.base)
    needed = {"global_train_batch_size": 1, "per_device_train_batch_size": 1, "max_duration": 1, "scheduler": {}}
    base_run = run_from_tree(base | {"training": base.get("training", {}) | needed})
    vocabulary = ladder.vocabulary_of_base(base_run)
    rungs = [
        ladder.make_rung(
            size,
            multiple,
            vocabulary=vocabulary,
            sequence_length=base_run.data.sequence_length,
            batch_multiple=namespace.batch_multiple,
        )
        for size in namespace.sizes
        for multiple in namespace.multiples
    ]
    trees = [ladder.rung_tree(rung, base, vocabulary) for rung in rungs]
    for tree in trees:
        run_from_tree(tree)  # refuses what would not load
    _print_table(rungs)
    if namespace.output is None:
        return 0
    files = [namespace.output / f"{tree['name'].lower()}.yaml" for tree in trees]
    there = [str(file) for file in files if file.exists()]
    if there and not namespace.force:
        raise ConfigError(f"these files exist: {', '.join(there)}; give another -o, or --force to replace them")
    namespace.output.mkdir(parents=True, exist_ok=True)
    for rung, tree, file in zip(rungs, trees, files, strict=True):
        header = ladder.header_of(rung, str(file), namespace.launch_file or rung.launch_file)
        file.write_text(header + OmegaConf.to_yaml(OmegaConf.create(tree)), encoding="utf-8")
    print(f"\nwrote {len(files)} files into {namespace.output}")
    return 0


def _print_table(rungs: "Sequence[Rung]") -> None:
    heads = ("run", "parameters", "learning rate", "batch", "tokens a step", "steps", "tokens", "operations")
    rows = [
        (
            rung.name,
            f"{rung.parameters:,}",
            f"{rung.learning_rate:.4e}",
            f"{rung.batch_instances:,}",
            f"{rung.batch_tokens:,}",
            f"{rung.steps:,}",
            f"{rung.length_tokens:,}",
            f"{6 * rung.parameters * rung.length_tokens:.3g}",
        )
        for rung in rungs
    ]
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    for row in [heads, *rows]:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))


def fit(namespace: argparse.Namespace) -> int:
    """Fits, prints, draws."""
    from olmo_hf.recipes.finished_runs import TRAINING_LOSS, load_runs, point_of
    from olmo_hf.recipes.scaling_law import fit_law, relative_residuals, why_no_law_of_size_and_length
    from olmo_hf.recipes.scaling_picture import draw_scaling

    wanted = [_size_and_length(word) for word in namespace.predict]
    runs = load_runs(namespace.runs, unfinished=namespace.unfinished)
    points = [point_of(one, namespace.metric) for one in runs]
    law = fit_law(points)
    lacking = why_no_law_of_size_and_length(points)
    if lacking is not None:
        print(f"a law of compute C = 6 N D: for one of size and length {lacking}")
    print(law.formula())
    residuals = relative_residuals(law, points)
    width = max(len(point.name) for point in points)
    for point, residual in zip(points, residuals, strict=True):
        print(
            f"{point.name:<{width}}  N {point.parameters:>14,.0f}  D {point.tokens:>18,.0f}  loss {point.loss:.4f}  "
            f"law {point.loss * (1 + residual):.4f}  ({residual:+.2%})"
        )
    predictions = [(size, tokens, law.predict(size, tokens)) for size, tokens in wanted]
    for size, tokens, loss in predictions:
        print(f"foretold for N {size:,.0f}  D {tokens:,.0f}: {loss:.4f}")
    namespace.output_dir.mkdir(parents=True, exist_ok=True)
    picture, record = namespace.output_dir / "scaling.png", namespace.output_dir / "scaling.json"
    loss_name = TRAINING_LOSS if namespace.metric is None else namespace.metric
    draw_scaling(points, picture, law=law, runs=runs, loss_name=loss_name)
    record.write_text(json.dumps(_as_json(law, points, residuals, predictions), indent=2) + "\n", encoding="utf-8")
    print(f"wrote {picture} and {record}")
    return 0


def _as_json(
    law: "ScalingLaw",
    points: "Sequence[Point]",
    residuals: Sequence[float],
    predictions: Sequence[tuple[float, float, float]],
) -> dict[str, object]:
    rows = [asdict(point) | {"residual": residual} for point, residual in zip(points, residuals, strict=True)]
    foretold = [{"parameters": size, "tokens": tokens, "loss": loss} for size, tokens, loss in predictions]
    return {"formula": law.formula(), **asdict(law), "runs": rows, "predictions": foretold}


def _size_and_length(word: str) -> tuple[float, float]:
    try:
        size, tokens = (float(part) for part in word.split(","))
    except ValueError as error:
        raise DataError(f"--predict: found {word!r}, expected N,D such as 7e9,4e12") from error
    if not (size > 0 and tokens > 0):
        raise DataError(f"--predict: found {word!r}, expected two numbers above 0")
    return size, tokens
