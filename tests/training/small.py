"""Small models, ragged batches and short runs of the trainer, for the tests that go through it."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM, PreTrainedModel

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.arguments import OlmoTrainingArguments
from olmo_hf.training.trainer import OlmoTrainer

VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 1,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}


class Olmo2Reader(Olmo2ForCausalLM):
    """A model whose class name does not end as Hugging Face expects of a causal language model."""


def tiny(kind: str = "ours") -> PreTrainedModel:
    """`ours`, `olmo2`, `llama` or `other_name`, always with the same weights."""
    torch.manual_seed(0)
    if kind == "ours":
        return OlmoHfForCausalLM(OlmoHfConfig(**SIZES))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, **ROPE))
    return {"olmo2": Olmo2ForCausalLM, "other_name": Olmo2Reader}[kind](Olmo2Config(**SIZES, **ROPE))


def with_zero_head(model: PreTrainedModel) -> PreTrainedModel:
    """All logits are 0, so that cross-entropy is the logarithm of the vocabulary."""
    torch.nn.init.zeros_(model.get_output_embeddings().weight)
    return model


def ragged_rows(count: int = 8, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Row i is trained on its last 2 + i targets only."""
    ids = torch.randint(VOCAB, (count, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for i in range(count):
        labels[i, : max(length - 2 - i, 0)] = -100
    return [{"input_ids": ids[i], "labels": labels[i]} for i in range(count)]


PLAIN_DESCENT: dict[str, Any] = {
    "optim": "sgd",
    "learning_rate": 1.0,
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "scheduler": SchedulerArgs(name="constant"),
}
"""The change of the weights is the gradient."""


def trainer_of(
    folder: Path, model: PreTrainedModel, rows: Any, *, trainer_class: Any = OlmoTrainer, **settings: Any
) -> OlmoTrainer:
    """A trainer that reads the rows in their order and logs every step."""
    chosen: dict[str, Any] = {
        "max_steps": 1,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "use_cpu": True,
        **settings,
    }
    args = OlmoTrainingArguments(output_dir=str(folder), report_to="none", disable_tqdm=True, **chosen)
    return trainer_class(model, args, train_dataset=rows)


def logged(trainer: OlmoTrainer, name: str) -> dict[int, float]:
    """Values of a metric by step."""
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
