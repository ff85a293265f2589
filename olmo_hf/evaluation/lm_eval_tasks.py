"""Our tasks as local tasks of lm-evaluation-harness: the same documents, contexts and continuations, offline.

Each task becomes `LABEL.jsonl` with one question per line and `LABEL.yaml` that describes it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from olmo_hf.evaluation.args import EvaluatorArgs, task_labels
from olmo_hf.evaluation.tasks.questions import ANSWER_METRICS, Question, read_questions
from olmo_hf.evaluation.tasks.table import find_tasks

_HEAD = """# Written by `olmo-hf evaluate --write-lm-eval`. The questions are in the file beside this one.
#
#   HF_HUB_OFFLINE=1 lm_eval --model hf --model_args pretrained=CHECKPOINT,dtype=float32 \\
#     --tasks {name} --include_path {folder}
#
# A model that reads more than {length} tokens also gets max_length={length}: questions are cut there in training.
"""


def write_lm_eval_tasks(args: EvaluatorArgs, folder: Path) -> list[Path]:
    """Writes the tasks of a downstream evaluator; returns the YAML files.

    Args:
        args: the tasks, their data, and how many questions.
        folder: where to; made if need be.

    Raises:
        ConfigError: tasks that do not exist.
        DataError: tasks that cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for task in find_tasks(task_labels(args), args.task_files):
        metrics = args.metrics if args.metrics else (task.metric,)
        questions = read_questions(
            task,
            task_data=args.task_data,
            max_questions=args.max_instances,
            answers_only=all(metric in ANSWER_METRICS for metric in metrics),
        )
        data = folder / f"{task.label}.jsonl"
        with data.open("w", encoding="utf-8") as stream:
            for question in questions:
                stream.write(json.dumps(_document(question), ensure_ascii=False) + "\n")
        name = f"olmo_{task.label}"
        path = folder / f"{task.label}.yaml"
        head = _HEAD.format(name=name, folder=folder, length=args.max_context_tokens)
        path.write_text(head + yaml.safe_dump(_task(name, data, questions), sort_keys=False), encoding="utf-8")
        paths.append(path)
    return paths


def _document(question: Question) -> dict[str, Any]:
    return {
        "contexts": [option.context for option in question.options],
        "continuations": [option.continuation for option in question.options],
        "answer": question.answer,
    }


def _task(name: str, data: Path, questions: Sequence[Question]) -> dict[str, Any]:
    common: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.absolute())}},
        "test_split": "test",
        "target_delimiter": "",
        "metadata": {"version": 1.0},
    }
    if all(len(question.options) == 1 for question in questions):
        return common | {
            "output_type": "loglikelihood",
            "doc_to_text": "{{contexts[0]}}",
            "doc_to_target": "{{continuations[0]}}",
            "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
        }
    several = any(len({option.context for option in question.options}) > 1 for question in questions)
    if several:
        # As the harness has Winogrande: the choices are what stands before, the target is what follows.
        prompt = {"doc_to_text": "answer", "doc_to_choice": "{{contexts}}", "doc_to_target": "{{continuations[0]}}"}
    else:
        prompt = {
            "doc_to_text": "{{contexts[0]}}",
            "doc_to_choice": "{{continuations}}",
            "doc_to_target": "answer",
        }
    metrics = [{"metric": one, "aggregation": "mean", "higher_is_better": True} for one in ("acc", "acc_norm")]
    return common | {"output_type": "multiple_choice", **prompt, "metric_list": metrics}
