"""What may be asked of evaluation: the `evaluation` section."""

from dataclasses import dataclass, field
from typing import Literal

from olmo_hf.data.args import DataArgs


@dataclass(frozen=True, kw_only=True)
class EvaluatorArgs:
    """One evaluator."""

    label: str = ""
    """Name in the metrics: `eval/{label}/Perplexity`."""

    type: Literal["perplexity"] = "perplexity"
    """Kind of evaluator."""

    data: DataArgs = field(default_factory=DataArgs)
    """Token files; nothing is inherited from the training data."""

    max_instances: int | None = None
    """Only the first so many instances. None: all."""

    mean_over: Literal["tokens", "instances"] = "tokens"
    """`tokens`: every labelled token counts the same. `instances`: every instance does, as the original OLMo trainer,
    which divides by all of an instance's targets, masked ones too."""

    bytes_per_token: float | None = None
    """Bytes of text per token of this set; adds bits per byte to the metrics. None: not reported."""


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
    seen: dict[str, int] = {}
    for index, one in enumerate(args.evaluators):
        key = f"evaluation.evaluators[{index}]"
        problems.extend(f"{key}.{problem}" for problem in _evaluator_problems(one))
        if one.label and one.label in seen:
            problems.append(
                f"{key}.label is {one.label!r}, which evaluation.evaluators[{seen[one.label]}] has too; "
                "their metrics would overwrite each other: give each its own label."
            )
        seen.setdefault(one.label, index)
    return problems


def _evaluator_problems(one: EvaluatorArgs) -> list[str]:
    problems: list[str] = []
    if not one.label:
        problems.append("label is missing; it names the metrics eval/LABEL/Perplexity: give it a short name.")
    if not one.data.paths and not one.data.sources and one.data.mix is None:
        problems.append("data.paths is empty; name the token files of this evaluator (nothing is inherited).")
    if one.max_instances is not None and one.max_instances < 1:
        problems.append(f"max_instances is {one.max_instances}; give at least 1, or leave it out for all.")
    if one.bytes_per_token is not None and not one.bytes_per_token > 0:
        problems.append(f"bytes_per_token is {one.bytes_per_token}; it must be above 0, or be left out.")
    return problems
