"""A bare loop over our own model, loss and optimizer: what is left of ours beyond it is what the trainer costs."""

import time

import numpy as np
import torch
from workloads import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    WORKLOADS,
    Z_LOSS_WEIGHT,
    rival_options,
    tell,
)

import olmo_hf.allocator  # noqa: F401 - as the trainer has it
from olmo_hf import OlmoHfConfig, OlmoHfForCausalLM
from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.loss_in_model import loss_settings, model_loss_sums


def main() -> None:
    options = rival_options()
    work = WORKLOADS[options.workload]
    torch.manual_seed(0)
    config = OlmoHfConfig(
        hidden_size=work.hidden_size,
        num_hidden_layers=work.num_layers,
        num_attention_heads=work.num_heads,
        intermediate_size=work.intermediate_size,
        vocab_size=work.vocab_size,
        max_position_embeddings=work.sequence_length,
        attn_implementation="sdpa",
    )
    model = OlmoHfForCausalLM(config).train()
    chunk = TrainingArgs.loss_chunk_tokens
    settings = loss_settings(model, implementation="auto", z_loss_weight=Z_LOSS_WEIGHT, chunk_tokens=chunk)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    tokens = np.memmap(options.folder / "tokens.npy", np.uint16, "r")
    rows = tokens[: len(tokens) // work.sequence_length * work.sequence_length].reshape(-1, work.sequence_length)
    targets = work.global_batch * (work.sequence_length - 1)
    seconds = []
    for step in range(options.steps):
        start = time.perf_counter()
        for part in range(work.accumulation):
            first = step * work.global_batch + part * work.micro_batch
            ids = torch.from_numpy(rows[first : first + work.micro_batch].astype(np.int64))
            terms, _ = model_loss_sums(model, {"input_ids": ids, "use_cache": False}, ids, settings)
            (terms.total / targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - start)
    tell(seconds)


if __name__ == "__main__":
    main()
