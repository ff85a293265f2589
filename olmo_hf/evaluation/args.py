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


@dataclass(frozen=True, kw_only=True)
class EvaluationArgs:
    """When evaluators run, and which."""

    interval: int | None = None
    """Steps between evaluations. None: only at the end."""

    on_load: bool = False
    """Also before the first step."""

    evaluators: tuple[EvaluatorArgs, ...] = ()
    """Evaluators, in the order they run."""
