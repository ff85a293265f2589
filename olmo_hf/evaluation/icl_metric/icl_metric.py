"""Log-likelihoods of continuations in, the scores of a task out, as an `evaluate` module.

    import evaluate
    from olmo_hf.evaluation.icl_metric import __path__ as place

    metric = evaluate.load(place[0], "acc")
    metric.add(prediction=-3.2, reference={"document": 0, "continuation": 0, "num_continuations": 4, ...})
    metric.compute()

Works without a network, and over several processes as every module of `evaluate` does: whichever process adds a
continuation, and however often it is added, it counts once.
"""

from typing import Any

import datasets
import evaluate
import numpy as np

from olmo_hf.errors import DataError
from olmo_hf.evaluation.args import METRICS
from olmo_hf.evaluation.scores import ContinuationTable, task_score

_DESCRIPTION = """\
Scores of multiple-choice and likelihood tasks from the summed log-probabilities of their continuations, by the
formulas of the original OLMo trainer: acc, f1, len_norm, ce_loss, bpb, pmi_dc.
"""
_INPUTS = """\
Args:
    predictions: summed log-probability of each continuation, in nats.
    references: of each continuation, `document` and `continuation` (numbers from 0), `num_continuations` and `answer`
        of its document, `num_characters` and `num_bytes` (its length without the space before it), and for pmi_dc
        `unconditional`: the log-probability without the question (0.0 otherwise).
Returns:
    The score under the name of the metric. Documents of which some continuation is missing are left out, and their
    number is returned as `incomplete`.
"""


class IclMetric(evaluate.Metric):
    """See the module."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise ValueError(f"config_name is {self.config_name!r}; expected one of {', '.join(METRICS)}")
        reference = {
            "document": datasets.Value("int64"),
            "continuation": datasets.Value("int64"),
            "num_continuations": datasets.Value("int64"),
            "answer": datasets.Value("int64"),
            "num_characters": datasets.Value("int64"),
            "num_bytes": datasets.Value("int64"),
            "unconditional": datasets.Value("float64"),
        }
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("float64"), "references": reference}),
        )

    def _compute(self, predictions: list[float], references: list[dict[str, Any]]) -> dict[str, float]:
        by_document: dict[int, dict[int, tuple[float, dict[str, Any]]]] = {}
        for prediction, reference in zip(predictions, references, strict=True):
            place = by_document.setdefault(reference["document"], {})
            place.setdefault(reference["continuation"], (prediction, reference))  # the first of several alike counts
        whole = {number: found for number, found in sorted(by_document.items()) if _is_whole(found)}
        if not whole:
            raise DataError(
                "no document has all of its continuations, so there is nothing to score; add the missing rows"
            )
        rows = [(number, *found[place]) for number, found in enumerate(whole.values()) for place in sorted(found)]
        table = ContinuationTable(
            question=np.array([number for number, _, _ in rows]),
            answer=np.array([found[0][1]["answer"] for found in whole.values()]),
            num_characters=np.array([reference["num_characters"] for _, _, reference in rows]),
            num_bytes=np.array([reference["num_bytes"] for _, _, reference in rows]),
        )
        sums = np.array([prediction for _, prediction, _ in rows])
        aside = np.array([reference["unconditional"] for _, _, reference in rows])
        name = str(self.config_name)
        score = task_score(name, table, sums, aside if name == "pmi_dc" else None)
        return {name: score, "incomplete": float(len(by_document) - len(whole))}


def _is_whole(found: dict[int, tuple[float, dict[str, Any]]]) -> bool:
    count = next(iter(found.values()))[1]["num_continuations"]
    return sorted(found) == list(range(count))
