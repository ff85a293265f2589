"""Downstream tasks: how likely a model finds the continuations of questions, and which it would choose.

What continuations and questions share is computed once, only positions that predict a continuation get logits, and
ranks share the questions without waiting for each other until the end.

Shapes: `B` rows, `S` tokens of a row, `N` scored positions, `M` scored tokens, `D` width, `V` vocabulary.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from olmo_hf import distributed
from olmo_hf.evaluation.encoding import Encode, encode_questions
from olmo_hf.evaluation.packing import Batch, Row, collate_rows, pack_rows, plan_batches
from olmo_hf.evaluation.scores import ContinuationTable, metric_name, task_score
from olmo_hf.evaluation.tasks.questions import Question
from olmo_hf.training.loss_in_model import bare_model

logger = logging.getLogger(__name__)

_CHUNK = 128
"""Positions whose logits are turned to float32 at a time."""

_TAKE_BRANCHES = ("olmo_hf", "olmo2", "olmo", "llama", "mistral", "qwen2", "qwen3")
"""Model types that take a ready mask and positions as they are."""


@dataclass(frozen=True)
class DownstreamOptions:
    """What decides how a task is computed; the result depends on `max_context_tokens` only."""

    max_context_tokens: int
    """A longer sequence loses its beginning."""

    batch_tokens: int
    """Most tokens of a forward pass."""

    empty_context: int | None = None
    """Id in the place of an empty context."""


class DownstreamEvaluator:
    """One task.

    Args:
        label: name in the metrics.
        questions: from `read_questions`, the same on every rank.
        encode: from texts to ids.
        metrics: what is reported.
        options: how it is computed.
    """

    def __init__(
        self,
        label: str,
        questions: Sequence[Question],
        encode: Encode,
        *,
        metrics: Sequence[str],
        options: DownstreamOptions,
    ):
        self.label = label
        self.metrics = tuple(metrics)
        self.table = continuation_table(questions)
        self.num_truncated = 0
        """Questions that were cut at their beginning; known after the first evaluation."""
        self._questions: Sequence[Question] | None = questions
        self._encode = encode
        self._options = options
        self._unconditional = "pmi_dc" in metrics
        self._batches: dict[bool, list[list[Row]]] = {}
        self._num_batches: dict[bool, int] = {}

    @property
    def num_questions(self) -> int:
        """How many questions count."""
        return len(self.table.answer)

    def prepare(self, model: nn.Module) -> None:
        """Does now what the first evaluation would do before its first pass: encode the questions and lay them out."""
        self._own_batches(takes_branches(model))

    def evaluate(
        self, model: nn.Module, *, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> dict[str, float]:
        """`eval/downstream/{label}_{metric}`; `ce_loss` and `bpb` under `eval/downstream_{metric}/`."""
        sums = self.log_likelihoods(model, device=device, autocast=autocast)
        count = len(self.table.question)
        aside = sums[count:] if self._unconditional else None
        return {
            metric_name(self.label, metric): task_score(metric, self.table, sums[:count], aside)
            for metric in self.metrics
        }

    @torch.no_grad()
    def log_likelihoods(
        self, model: nn.Module, *, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
    ) -> np.ndarray:
        """Summed log-probability of every continuation, in nats, on every rank alike; float64.

        For `pmi_dc` those without the question follow. The logarithm is taken in float32 whatever the model computes
        in; the original takes it in the type of the logits.
        """
        share = takes_branches(model)
        batches = self._own_batches(share)
        # DDP would exchange buffers before every pass; sharded weights need as many passes on every rank.
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        size = len(self.table.question) * (2 if self._unconditional else 1)
        sums = torch.zeros(size, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        for place in range(self._num_batches[share]):
            batch = collate_rows(batches[place]) if place < len(batches) else None
            found = batch_log_probabilities(inner, batch, device=device, autocast=autocast)  # (M,)
            if batch is not None:
                sums.index_add_(0, torch.from_numpy(batch.slots).to(sums.device), found.to(sums.device, sums.dtype))
        # Every continuation is computed on one rank and is zero on the others.
        return distributed.all_reduce_sum(sums).cpu().numpy()

    def _own_batches(self, share: bool) -> list[list[Row]]:
        """The batches of this rank, made once: they do not depend on the weights."""
        if share not in self._batches:
            assert self._questions is not None
            first_slots = self.table.first.tolist()
            numbered = list(zip(first_slots, self._questions, strict=True))
            # Dealt by length, neighbours together as far as they begin alike.
            encoded = encode_questions(
                [numbered[place] for place in questions_of_rank(self._questions)],
                self._encode,
                max_tokens=self._options.max_context_tokens,
                empty_context=self._options.empty_context,
                unconditional_offset=len(self.table.question) if self._unconditional else None,
            )
            rows = pack_rows(encoded.sequences, share=share)
            self._batches[share] = plan_batches(rows, batch_tokens=self._options.batch_tokens)
            by_rank = distributed.gather_objects((len(self._batches[share]), encoded.num_truncated))
            self._num_batches[share] = max(number for number, _ in by_rank)
            self._report(sum(number for _, number in by_rank))
        return self._batches[share]

    def _report(self, num_truncated: int) -> None:
        self.num_truncated = num_truncated
        if num_truncated and distributed.is_main_process():
            logger.warning(
                "Task %s: %d of %d questions are longer than the %d tokens that the model is given; their beginning "
                "was cut off.",
                self.label,
                num_truncated,
                self.num_questions,
                self._options.max_context_tokens,
            )


def continuation_table(questions: Sequence[Question]) -> ContinuationTable:
    """The continuations of some questions, in their order."""
    options = [(place, option) for place, question in enumerate(questions) for option in question.options]
    return ContinuationTable(
        question=np.array([place for place, _ in options]),
        answer=np.array([question.answer for question in questions]),
        num_characters=np.array([option.num_characters for _, option in options]),
        num_bytes=np.array([option.num_bytes for _, option in options]),
    )


def questions_of_rank(questions: Sequence[Question]) -> list[int]:
    """Which questions this rank computes: every one is somebody's, and each rank has long ones and short ones.

    Blocks of questions that follow each other in the task are dealt out, because they share examples.
    """
    world = distributed.world_size()
    if world == 1:
        return list(range(len(questions)))
    block = max(1, min(8, len(questions) // (4 * world)))
    blocks = [list(range(start, min(start + block, len(questions)))) for start in range(0, len(questions), block)]
    blocks.sort(key=lambda places: -sum(len(questions[place].options[0].context) for place in places))
    return [place for places in blocks[distributed.rank() :: world] for place in places]


def takes_branches(model: nn.Module) -> bool:
    """Whether a model can be given rows in which a token attends to some of those before it only."""
    inner = bare_model(model)
    if inner is None or inner.config.model_type not in _TAKE_BRANCHES:
        return False
    by_distance = getattr(inner.config, "position_embedding", "rope") == "alibi"
    windows = getattr(inner.config, "sliding_window", None) is not None
    return inner.config._attn_implementation in ("sdpa", "eager") and not by_distance and not windows


def batch_log_probabilities(
    model: nn.Module,
    batch: Batch | None,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> torch.Tensor:
    """(M,) log-probability of each scored token, in nats.

    Args:
        model: not in training mode.
        batch: None makes a pass over a single token, for the sake of the other ranks.
        device: where the model is.
        autocast: opens the context in which the model runs.
    """
    if batch is None:
        with autocast(), _head_at(model, torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)):
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
        return torch.zeros(0)
    inputs: dict[str, Any] = {"input_ids": torch.from_numpy(batch.input_ids).to(device)}  # (B, S)
    if batch.attends is not None:
        inputs["attention_mask"] = _mask(model, torch.from_numpy(batch.attends)[:, None].to(device))  # (B, 1, S, S)
        inputs["position_ids"] = torch.from_numpy(batch.position_ids).to(device)
    rows, positions = torch.from_numpy(batch.scored_rows), torch.from_numpy(batch.scored_positions)
    with autocast(), _head_at(model, rows.to(device), positions.to(device)):
        logits = model(**inputs, use_cache=False).logits[0]  # (N, V)
    index, targets = torch.from_numpy(batch.index).to(device), torch.from_numpy(batch.targets).to(device)
    return logits[index, targets].float() - _log_partitions(logits)[index]


def _log_partitions(logits: torch.Tensor) -> torch.Tensor:
    """(N,) logarithm of the summed exponentials of (N, V) logits, in float32, some positions at a time."""
    return torch.cat([torch.logsumexp(chunk.float(), dim=-1) for chunk in logits.split(_CHUNK)])


def _mask(model: nn.Module, attends: torch.Tensor) -> torch.Tensor:
    inner = bare_model(model)
    if inner is None or inner.config._attn_implementation != "eager":
        return attends
    # The eager kernel adds its mask to the scores.
    dtype: torch.dtype = inner.dtype
    return torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill(~attends, torch.finfo(dtype).min)


@contextmanager
def _head_at(model: nn.Module, rows: torch.Tensor, positions: torch.Tensor) -> Iterator[None]:
    """For the length of a call the head sees the hidden states of some positions only.

    What a model does with its logits it does to each for itself, so it need not know. Under FSDP the hook runs where
    the head's weight is whole.
    """
    inner = bare_model(model)
    head = None if inner is None else inner.get_output_embeddings()
    assert head is not None, "a causal language model has a head"

    def select(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = arguments[0]  # (B, S, D)
        return (hidden[rows.to(hidden.device), positions.to(hidden.device)][None], *arguments[1:])  # (1, N, D)

    hook = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        hook.remove()
