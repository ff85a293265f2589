"""`olmo-hf evaluate`: tasks and perplexity of finished models, of one checkpoint or of all of a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olmo_hf.evaluation.args import EvaluatorArgs
    from olmo_hf.recipes.evaluate import EvaluateOptions

HELP = "measure a checkpoint, a hub model or all checkpoints of a run on tasks and token files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the verb."""
    parser.add_argument(
        "models",
        nargs="*",
        metavar="CHECKPOINT",
        help="checkpoint or run directory, or a hub id; several are compared",
    )
    parser.add_argument("--all", action="store_true", help="all whole checkpoints of the run, and a plot over steps")
    parser.add_argument("--tasks", default="", metavar="A,B,...", help="labels of tasks, with commas between")
    parser.add_argument("--task-file", action="append", default=[], metavar="YAML", help="tasks of your own")
    parser.add_argument("--task-data", metavar="DIR", help="data of the tasks, where the package is not installed")
    parser.add_argument(
        "--metrics",
        default="",
        metavar="A,B,...",
        help="acc, f1, len_norm, ce_loss, bpb, pmi_dc (default: the task's own)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each task")
    parser.add_argument(
        "--max-context-tokens", type=int, default=2048, metavar="N", help="longer questions lose their beginning"
    )
    parser.add_argument("--config", type=Path, metavar="RUN.yaml", help="also the evaluators of this run")
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="directory or tokenizer.json (default: beside the checkpoint)"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="instances at a time")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights"
    )
    parser.add_argument("--device", help="cpu, cuda, ... (default: the accelerator, if there is one)")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="where evaluation.json and evaluation.png go")
    parser.add_argument("--list-tasks", action="store_true", help="list all tasks and stop")
    parser.add_argument(
        "--write-lm-eval",
        type=Path,
        metavar="DIR",
        help="write the tasks as local tasks of lm-evaluation-harness and stop",
    )


def run(namespace: argparse.Namespace) -> int:
    """Evaluates, prints a table and writes what was found."""
    from olmo_hf.evaluation.args import EvaluatorArgs
    from olmo_hf.recipes.evaluate import EvaluateOptions

    downstream = EvaluatorArgs(
        type="downstream",
        tasks=_words(namespace.tasks),
        task_files=tuple(namespace.task_file),
        task_data=namespace.task_data,
        metrics=_words(namespace.metrics),
        max_context_tokens=namespace.max_context_tokens,
        max_instances=namespace.limit,
    )
    if namespace.list_tasks:
        sys.stdout.write(_task_list(downstream))
        return 0
    if namespace.write_lm_eval is not None:
        from olmo_hf.evaluation.lm_eval_tasks import write_lm_eval_tasks

        for path in write_lm_eval_tasks(downstream, namespace.write_lm_eval):
            sys.stdout.write(f"{path}\n")
        return 0
    options = EvaluateOptions(
        models=tuple(namespace.models),
        all_checkpoints=namespace.all,
        downstream=downstream,
        config=namespace.config,
        tokenizer=namespace.tokenizer,
        batch_size=namespace.batch_size,
        dtype=namespace.dtype,
        device=namespace.device,
    )
    _evaluate(options, namespace.output)
    return 0


def _evaluate(options: "EvaluateOptions", output: Path | None) -> None:
    from transformers.utils import logging

    from olmo_hf.distributed import is_main_process, start_processes
    from olmo_hf.recipes.evaluate import comparable, evaluate_targets, find_targets, write_results
    from olmo_hf.report.evaluations import draw_evaluations

    logging.disable_progress_bar()  # of weights that are read; it would stand between the results
    start_processes()
    targets, notes = find_targets(options.models, all_checkpoints=options.all_checkpoints)
    results = []
    for result in evaluate_targets(options, targets):
        results.append(result)
        if is_main_process() and len(targets) > 1:
            sys.stderr.write(f"{result.target.name}: done, {len(results)} of {len(targets)}\n")
    if not is_main_process():
        return
    rows = comparable(results)
    names = [result.target.name for result in results]
    steps = [result.target.step for result in results]
    places: list[int | str] = [step if step is not None else name for step, name in zip(steps, names, strict=True)]
    _print_table(rows, names)
    for note in notes:
        sys.stderr.write(f"note: {note}\n")
    if output is not None:
        write_results(results, output / "evaluation.json")
        sys.stdout.write(f"{output / 'evaluation.json'}\n")
        if len(results) > 1:
            draw_evaluations(rows, places if None not in steps else names, output / "evaluation.png")
            sys.stdout.write(f"{output / 'evaluation.png'}\n")


def _print_table(rows: Sequence[tuple[str, Sequence[float | None]]], names: Sequence[str]) -> None:
    """Metrics down, models across; the last parts of their names where that is enough."""
    ends = [Path(name).name for name in names]
    heads = ends if len(set(ends)) == len(ends) else list(names)
    first = max([len(name) for name, _ in rows], default=0)
    widths = [max(len(head), 10) for head in heads]
    sys.stdout.write(
        " ".join([" " * first, *(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]) + "\n"
    )
    for name, values in rows:
        cells = ["-" if value is None else f"{value:.6g}" for value in values]
        line = " ".join([f"{name:<{first}}", *(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))])
        sys.stdout.write(line + "\n")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _task_list(downstream: "EvaluatorArgs") -> str:
    from olmo_hf.evaluation.tasks.table import all_tasks

    tasks = all_tasks(downstream.task_files)
    width = max(map(len, tasks))
    rows = [
        f"{label:<{width}}  {task.metric:<8}  {task.requests or task.documents}\n" for label, task in tasks.items()
    ]
    return "".join(rows)
