"""What is measured in training: names, units, and sums that stay on the device until a step is logged.

Shapes: `B` batch, `S` sequence, `K` sources.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from olmo_hf.distributed import all_reduce_sum
from olmo_hf.training.loss import IGNORE_INDEX, count_labels

UNITS = {
    "train/CrossEntropyLoss": "nats per token of the denominator, without the z term; mean over the logged steps",
    "train/ZLoss": "z_loss_weight times the mean squared log-partition, nats squared",
    "train/Perplexity": "exp(train/CrossEntropyLoss)",
    "train/masked_instances": "instances of the global batch that the filter left untrained, per step",
    "train/source/{source}/CrossEntropyLoss": "nats per labelled target of that source",
    "train/skipped_steps": "updates left out since the start of this launch, their gradient being no number",
    "optim/total_grad_norm": "L2 norm of all gradients before clipping",
    "optim/clipping_rate": "share of tensors (adaptive) or of updates (global) that were scaled down, 0 to 1",
    "optim/learning_rate_group{i}": "rate that the update used",
    "optim/{grad|param|exp_avg|exp_avg_sq}/{parameter}.{norm|min|max|avg}": "L2 norm; extremes of |x|; mean of x",
    "optim/grad_norm_exp_avg/{parameter}": "running gradient norm of adaptive clipping",
    "optim/step/{parameter}.{norm|max}": "size of what AdamW added to a parameter",
    "optim/update_cos_sim": "cosine of Lion's update to its sign",
    "throughput/total_tokens": "tokens trained on since the start of the run, all ranks",
    "throughput/total_training_Gflops": "1e9 floating-point operations since the start of the run",
    "throughput/total_training_log_Gflops": "natural logarithm of the line above",
    "throughput/device/tokens_per_second": "tokens per second and device",
    "throughput/device/batches_per_second": "optimizer steps per second",
    "throughput/device/mfu": "share of the device's peak that the model's arithmetic uses, 0 to 1",
    "System/Peak Memory (MB)": "1e6 bytes, largest over ranks",
}
"""Every metric by name and unit; the names are the original trainer's where it has the metric."""


def perplexity(cross_entropy: float) -> float:
    """exp of a mean cross-entropy in nats; infinite where that cannot be held."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf


def batch_counts(batches: Sequence[dict[str, Any]], device: torch.device) -> torch.Tensor:
    """What the micro-batches of one step hold, counted where they are.

    Args:
        batches: each with `labels` (B, S), and `instance_mask` (B,) where instances are filtered.
        device: where the counts are wanted.

    Returns:
        (4,), int64: labelled targets, tokens, instances with a mask, and those of them that the mask leaves out.
    """
    counts = torch.zeros(4, dtype=torch.int64, device=device)
    for batch in batches:
        labels, mask = batch["labels"], batch.get("instance_mask")
        counts[0] += count_labels(labels).to(device)
        counts[1] += labels.numel()
        if mask is not None:
            counts[2] += mask.numel()
            counts[3] += (~mask).sum().to(device)
    return counts


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class MetricSums:
    """Named sums over micro-batches, in double precision on the device; read once, when they are logged."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, **values: torch.Tensor | float) -> None:
        """Adds to the sums of these names; nothing waits for the device."""
        for name, value in values.items():
            value = torch.as_tensor(value).detach()
            value = value.to(_sum_dtype(value.device))
            before = self._sums.get(name)
            self._sums[name] = value if before is None else before.to(value.device) + value

    def take(self) -> dict[str, float]:
        """Sums over all ranks, by one collective and one read; starts again from nothing.

        A collective: every rank calls it, having added the same names.
        """
        if not self._sums:
            return {}
        names = sorted(self._sums)
        device = max((value.device for value in self._sums.values()), key=lambda device: device.type != "cpu")
        stacked = torch.stack([self._sums[name].to(device) for name in names])
        self._sums = {}
        return dict(zip(names, all_reduce_sum(stacked).tolist(), strict=True))


class SourceSums:
    """Cross-entropy by the source of the data, summed on the device.

    Args:
        sources: names; a batch refers to them by position.
    """

    def __init__(self, sources: Sequence[str]):
        self.sources = list(sources)
        self._sums: torch.Tensor | None = None  # (2, K): cross-entropy, labelled targets

    def add(self, token_ce: torch.Tensor, labels: torch.Tensor, source_ids: torch.Tensor) -> None:
        """Adds one forward pass.

        Args:
            token_ce: (B, S - 1), as in `LossTerms`.
            labels: (B, S), not shifted.
            source_ids: (B,), int64, positions in `sources`.
        """
        dtype = _sum_dtype(token_ce.device)
        rows = torch.stack([token_ce.to(dtype).sum(dim=1), (labels[:, 1:] != IGNORE_INDEX).sum(dim=1).to(dtype)])
        if self._sums is None:
            self._sums = torch.zeros(2, len(self.sources), dtype=dtype, device=token_ce.device)
        self._sums.index_add_(1, source_ids.to(token_ce.device), rows)

    def take(self) -> dict[str, float]:
        """`train/source/{source}/CrossEntropyLoss` of every source that was seen, over all ranks; starts again.

        A collective: every rank calls it, having added at least one batch.
        """
        if self._sums is None:
            return {}
        ce_sums, counts = all_reduce_sum(self._sums).tolist()
        self._sums = None
        return {
            f"train/source/{source}/CrossEntropyLoss": ce_sum / count
            for source, ce_sum, count in zip(self.sources, ce_sums, counts, strict=True)
            if count > 0
        }
