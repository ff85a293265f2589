"""What a task reports, from the log-likelihoods of its continuations: pure functions, the formulas of the original.

Shapes: `M` continuations of all questions together, `N` questions.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class ContinuationTable:
    """What is known of the continuations before a model has seen them.

    Attributes:
        question: (M,) the question of each continuation, counted from 0 and rising.
        answer: (N,) place of the right continuation within its question.
        num_characters: (M,) length in characters, without the space before.
        num_bytes: (M,) the same in UTF-8.
    """

    question: Array
    answer: Array
    num_characters: Array
    num_bytes: Array

    @property
    def first(self) -> Array:
        """(N,) where the continuations of each question begin."""
        return np.searchsorted(self.question, np.arange(len(self.answer)))


def task_score(
    metric: str, table: ContinuationTable, log_likelihoods: Array, unconditional: Array | None = None
) -> float:
    """One number for a task.

    - `acc`, `len_norm`, `pmi_dc`: share of questions whose right continuation scores highest; of equal ones the first
      counts. Scores are the log-likelihood, it per character, and its difference to the log-likelihood without the
      question (the original divides by a sum of logits there, and cannot run it while training).
    - `f1`: of the first continuation against all others, by the log-likelihood.
    - `ce_loss`, `bpb`: of the right continuation, nats per character and bits per byte.

    Args:
        metric: one of these.
        table: the continuations.
        log_likelihoods: (M,) sums over the tokens of each continuation, in nats.
        unconditional: (M,) the same without the question, for `pmi_dc`.

    Returns:
        The score; not a number when a log-likelihood is none, so that a broken model is not taken for a bad one.
    """
    given = log_likelihoods if unconditional is None else np.concatenate([log_likelihoods, unconditional])
    if np.isnan(given).any():
        return math.nan
    if metric in ("ce_loss", "bpb"):
        right = table.first + table.answer  # (N,)
        length = table.num_characters if metric == "ce_loss" else table.num_bytes * math.log(2)
        return float(np.mean(-log_likelihoods[right] / length[right]))
    if metric == "len_norm":
        chosen = _chosen(table, log_likelihoods / table.num_characters)
    elif metric == "pmi_dc":
        assert unconditional is not None, "pmi_dc compares with the log-likelihood without the question"
        chosen = _chosen(table, log_likelihoods - unconditional)
    else:
        chosen = _chosen(table, log_likelihoods)
    if metric == "f1":
        return _f1(table.answer == 0, chosen == 0)
    return float(np.mean(chosen == table.answer))


def _chosen(table: ContinuationTable, scores: Array) -> Array:
    """(N,) place of the highest score of each question.

    Compared in float32, as the original does, so that what is equal there is equal here.
    """
    bounds = [*table.first.tolist(), len(scores)]
    single = scores.astype(np.float32)
    return np.array([int(np.argmax(single[start:stop])) for start, stop in itertools.pairwise(bounds)])


def _f1(is_positive: Array, is_predicted: Array) -> float:
    both = int(np.sum(is_positive & is_predicted))
    total = int(np.sum(is_positive)) + int(np.sum(is_predicted))
    return 2 * both / total if total else 0.0


def metric_name(label: str, metric: str) -> str:
    """Name under which the original logs a task."""
    group = f"downstream_{metric}" if metric in ("ce_loss", "bpb") else "downstream"
    return f"eval/{group}/{label}_{metric}"
