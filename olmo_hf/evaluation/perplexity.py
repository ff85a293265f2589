"""Cross-entropy and perplexity of a set of token files, exact to the token.

Shapes: `B` batch, `S` sequence, `V` vocabulary.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from olmo_hf import distributed
from olmo_hf.training.metrics import perplexity

logger = logging.getLogger(__name__)

IGNORED = -100
"""Label of a position that is not counted."""

MODEL_INPUTS = ("input_ids", "attention_mask", "attention_bias", "position_ids", "doc_lens")
"""What of a batch the model takes; the rest is for those who count or show it."""


def cross_entropy_sums(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy and number of counted targets of each instance.

    Args:
        logits: (B, S, V), any floating type; the logarithm is taken in float32, one instance at a time, so that no
            second copy of all logits is held.
        labels: (B, S), unshifted: position t predicts `labels[:, t + 1]`; -100 is not counted.

    Returns:
        Sums, (B,) float64, and counts, (B,) int64.
    """
    targets = labels[:, 1:]  # (B, S - 1)
    sums = [
        F.cross_entropy(logits[row, :-1].float(), targets[row], ignore_index=IGNORED, reduction="none").double().sum()
        for row in range(labels.shape[0])
    ]
    return torch.stack(sums), (targets != IGNORED).sum(dim=1)


def batches_of_rank(
    num_instances: int, *, batch_size: int, rank: int, world_size: int
) -> Iterator[tuple[list[int], int]]:
    """Instances of each batch of one rank and how many of them count.

    Every rank gets the same number of full batches, since a forward pass may be a collective; the places that are
    left over repeat the first instance and do not count. Together the ranks count every instance exactly once.
    """
    own = range(rank, num_instances, world_size)
    per_rank = -(-num_instances // world_size)
    for start in range(0, per_rank, batch_size):
        counted = list(own[start : start + batch_size])
        yield counted + [0] * (batch_size - len(counted)), len(counted)


class PerplexityEvaluator:
    """Mean cross-entropy over the labelled targets of a data set and what follows from it.

    The mean does not depend on the batch size, on the number of ranks or on how full the last batch is: sums are
    gathered in float64 and divided once. No random number is drawn.

    Args:
        label: name in the metrics.
        dataset: has a length; an item is what `collate` takes.
        collate: makes a batch with `input_ids` and unshifted `labels`, both (B, S).
        batch_size: instances per forward pass and device.
        max_instances: only the first so many. None: all.
        mean_over: `tokens`, or `instances` as the original (spec: eval.md section 2).
        bytes_per_token: adds bits per byte. None: not reported.
    """

    def __init__(
        self,
        label: str,
        dataset: Any,
        collate: Callable[[Sequence[Any]], Mapping[str, Any]],
        *,
        batch_size: int,
        max_instances: int | None = None,
        mean_over: Literal["tokens", "instances"] = "tokens",
        bytes_per_token: float | None = None,
    ):
        self.label = label
        self._dataset = dataset
        self._collate = collate
        self._batch_size = batch_size
        self._num_instances = len(dataset) if max_instances is None else min(max_instances, len(dataset))
        self._mean_over = mean_over
        self._bytes_per_token = bytes_per_token

    def evaluate(
        self, model: nn.Module, *, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> dict[str, float]:
        """`eval/{label}/CrossEntropyLoss`, `.../Perplexity` and, when asked for, `.../BitsPerByte`.

        A set without a single labelled target has no mean: nothing is returned, and a warning says so.
        """
        # MPS has no float64; a single process may add up on the CPU.
        totals = torch.zeros(2, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        places = batches_of_rank(
            self._num_instances,
            batch_size=self._batch_size,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
        )
        for instances, num_counted in places:
            batch = self._collate([self._dataset[instance] for instance in instances])
            labels = batch["labels"].to(device)  # (B, S)
            inputs = {name: batch[name].to(device) for name in MODEL_INPUTS if name in batch}
            with autocast():
                # A cache would make the model's mask ignore document boundaries.
                logits = model(**inputs, use_cache=False).logits  # (B, S, V)
            sums, counts = cross_entropy_sums(logits[:num_counted], labels[:num_counted]) if num_counted else _NOTHING
            totals += self._contribution(sums, counts, num_targets=labels.shape[1] - 1).to(totals.device)
        total, weight = distributed.all_reduce_sum(totals).tolist()
        if weight == 0:
            logger.warning("Evaluator %s has no labelled target; it reports nothing.", self.label)
            return {}
        return self._metrics(total / weight)

    def _contribution(self, sums: torch.Tensor, counts: torch.Tensor, *, num_targets: int) -> torch.Tensor:
        if self._mean_over == "instances":
            return torch.stack([(sums / num_targets).sum(), torch.tensor(float(len(sums))).to(sums)])
        return torch.stack([sums.sum(), counts.sum().to(sums)])

    def _metrics(self, cross_entropy: float) -> dict[str, float]:
        metrics = {
            f"eval/{self.label}/CrossEntropyLoss": cross_entropy,
            f"eval/{self.label}/Perplexity": perplexity(cross_entropy),
        }
        if self._bytes_per_token is not None:
            metrics[f"eval/{self.label}/BitsPerByte"] = cross_entropy / math.log(2) / self._bytes_per_token
        return metrics


_NOTHING = (torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
