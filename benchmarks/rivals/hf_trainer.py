"""Hugging Face's `Trainer` with transformers' Olmo2, as its documentation uses it, with z-loss by a loss function."""

import time
from typing import Any

import numpy as np
import torch
from bare import loss_sum, stock_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from workloads import BETAS, EPSILON, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, WORKLOADS, rival_options, tell


class Rows(torch.utils.data.Dataset):
    """Instances of a token file."""

    def __init__(self, path: Any, length: int):
        self.tokens, self.length = np.memmap(path, np.uint16, "r"), length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.tokens[index * self.length : (index + 1) * self.length].astype(np.int64)
        return {"input_ids": torch.from_numpy(row), "labels": torch.from_numpy(row)}


class Clock(TrainerCallback):
    """End of every step."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.marks.append(time.perf_counter())


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return loss_sum(outputs["logits"], labels) / num_items_in_batch


def main() -> None:
    options = rival_options()
    work = WORKLOADS[options.workload]
    clock = Clock()
    args = TrainingArguments(
        output_dir=str(options.folder / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=work.micro_batch,
        gradient_accumulation_steps=work.accumulation,
        learning_rate=LEARNING_RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPSILON,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = Rows(options.folder / "tokens.npy", work.sequence_length)
    Trainer(stock_model(work), args, train_dataset=rows, callbacks=[clock], compute_loss_func=summed_loss).train()
    tell(list(np.diff(clock.marks)))


if __name__ == "__main__":
    main()
