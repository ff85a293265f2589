"""A bare loop: transformers' Olmo2, the fused AdamW of torch, clipping and z-loss, in a page of code."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import Olmo2Config, Olmo2ForCausalLM
from workloads import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    WORKLOADS,
    Z_LOSS_WEIGHT,
    Workload,
    rival_options,
    tell,
)

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""From a model and (B, S) ids to the sum of their losses."""


def stock_model(work: Workload) -> Olmo2ForCausalLM:
    """transformers' own OLMo-2 with the shape of the work."""
    torch.manual_seed(0)
    config = Olmo2Config(**work.shape, rope_theta=500_000, attn_implementation="sdpa")
    return Olmo2ForCausalLM(config).train()


def loss_sum(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy and z of (B, S, V) logits over (B, S) ids, summed over positions."""
    flat, targets = logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    partition = flat.logsumexp(-1)
    return F.cross_entropy(flat, targets, reduction="sum") + Z_LOSS_WEIGHT * partition.square().sum()


def token_rows(path: Path, work: Workload) -> np.ndarray:
    """(instances, S) of a token file."""
    tokens = np.memmap(path, np.uint16, "r")
    return tokens[: len(tokens) // work.sequence_length * work.sequence_length].reshape(-1, work.sequence_length)


def fused_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )


def stock_loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Sum of the losses over (B, S) ids, from the model's logits."""
    return loss_sum(model(input_ids=ids, use_cache=False).logits, ids)


def training_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: np.ndarray,
    work: Workload,
    step: int,
    loss: Loss = stock_loss,
) -> None:
    """All micro-batches of a step, and the update."""
    targets = work.global_batch * (work.sequence_length - 1)
    for part in range(work.accumulation):
        first = step * work.global_batch + part * work.micro_batch
        ids = torch.from_numpy(rows[first : first + work.micro_batch].astype(np.int64))
        (loss(model, ids) / targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run(model: torch.nn.Module, loss: Loss, options: argparse.Namespace) -> None:
    """All steps that were asked for, timed."""
    work = WORKLOADS[options.workload]
    optimizer, rows = fused_adamw(model), token_rows(options.folder / "tokens.npy", work)
    seconds = []
    for step in range(options.steps):
        start = time.perf_counter()
        training_step(model, optimizer, rows, work, step, loss)
        seconds.append(time.perf_counter() - start)
    tell(seconds)


def main() -> None:
    options = rival_options()
    model = stock_model(WORKLOADS[options.workload])
    if options.compile:
        model.compile()
    run(model, stock_loss, options)


if __name__ == "__main__":
    main()
