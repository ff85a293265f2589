"""A bare loop over our own model, loss and optimizer: what is left of ours beyond it is what the trainer costs."""

import torch
from bare import run
from workloads import WORKLOADS, Z_LOSS_WEIGHT, Workload, rival_options

import olmo_hf.allocator  # noqa: F401 - as the trainer has it
from olmo_hf import OlmoHfConfig, OlmoHfForCausalLM
from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.loss_in_model import loss_settings, model_loss_sums


def own_model(work: Workload) -> OlmoHfForCausalLM:
    """Our OLMo-2 with the shape of the work."""
    torch.manual_seed(0)
    return OlmoHfForCausalLM(OlmoHfConfig(**work.shape, attn_implementation="sdpa")).train()


def main() -> None:
    options = rival_options()
    model = own_model(WORKLOADS[options.workload])
    chunk = TrainingArgs.loss_chunk_tokens
    settings = loss_settings(model, implementation="auto", z_loss_weight=Z_LOSS_WEIGHT, chunk_tokens=chunk)

    def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        terms, _ = model_loss_sums(model, {"input_ids": ids, "use_cache": False}, ids, settings)
        return terms.total

    run(model, loss, options)


if __name__ == "__main__":
    main()
