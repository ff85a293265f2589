"""What the forward pass of a model keeps for the backward pass, counted without memory and without a device.

The model runs once on tensors that have shapes but no content, and every tensor that autograd would keep is counted
once by its storage. So the figure follows the model's code, precision and recomputation instead of a formula.

Shapes: `B` batch, `S` sequence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from olmo_hf.model.activation_checkpointing import apply_activation_checkpointing
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

# Without a mask function under this name no mask is made: causal attention that keeps q, k, v and its output, as the
# fused kernels do.
_ATTENTION = "olmo_hf_fused_causal"
AttentionInterface.register(_ATTENTION, sdpa_attention_forward)


@dataclass(frozen=True)
class KeptBytes:
    """What one forward pass keeps until the backward pass, logits not counted.

    Attributes:
        per_instance: Activations of one instance.
        weight_copies: Copies of the weights in the precision of the products, made once per pass.
    """

    per_instance: int
    weight_copies: int


def kept_bytes(
    config: OlmoHfConfig, *, sequence_length: int, bf16: bool, activation_checkpointing: str | None
) -> KeptBytes:
    """Counts for two batch sizes and tells what grows with the batch from what does not."""
    config = OlmoHfConfig(**config.to_init_dict())
    config._attn_implementation = "sdpa" if config.position_embedding == "alibi" else _ATTENTION
    with torch.device("meta"):
        model = OlmoHfForCausalLM(config)
    if activation_checkpointing is not None:
        apply_activation_checkpointing(model, activation_checkpointing)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.train()
        one, two = (_kept(model, torch.Size((b, sequence_length)), bf16) for b in (1, 2))
    return KeptBytes(per_instance=two - one, weight_copies=2 * one - two)


def _kept(model: OlmoHfForCausalLM, shape: torch.Size, bf16: bool) -> int:
    """Bytes kept by one pass over input_ids (B, S) through all layers, without the head."""
    kept: dict[int, Any] = {}
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that its number is not used again
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        model.model(torch.zeros(shape, dtype=torch.long), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())
