"""Memory of one device in training, estimated item by item. Pure arithmetic; the activations come in as a number."""

from dataclasses import dataclass
from typing import Literal

from olmo_hf.model.size import ParameterCount

Sharding = Literal["full", "grad", "none"]
"""Over all devices: `full`: weights, gradients and optimizer (FSDP). `grad`: the same, but gathered weights stay until
the backward pass. `none`: nothing (DDP, or one device)."""

FLOAT32_BYTES = 4
MOMENT_BYTES = {"adamw": 8, "lion": 4, "muon": 8}
"""Bytes of optimizer state per parameter; `muon` keeps one moment for hidden matrices, see `optimizer_bytes`."""

UNSHARDED_LAYERS = 2
"""Layers whose whole weights exist at once under `full`: the one that runs and the next one, which is fetched."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What the memory depends on beside the model.

    Attributes:
        num_devices: Devices.
        sharding: What is spread over them.
        optimizer: `training.optimizer`.
        bf16: Whether products run in bfloat16.
        loss_implementation: `training.loss_implementation`, with `auto` already decided.
        loss_chunk_tokens: Positions whose logits exist at once.
        micro_batch_tokens: Tokens of one forward pass.
    """

    num_devices: int
    sharding: Sharding
    optimizer: str
    bf16: bool
    loss_implementation: str
    loss_chunk_tokens: int
    micro_batch_tokens: int

    @property
    def shards(self) -> int:
        """Parts that weights, gradients and optimizer are cut into."""
        return 1 if self.sharding == "none" else self.num_devices

    @property
    def product_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        return 2 if self.bf16 else FLOAT32_BYTES


@dataclass(frozen=True)
class Memory:
    """Bytes of one device. What libraries need for themselves and what fragmentation costs is not in it."""

    weights: int
    weight_copies: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.weights + self.weight_copies + self.gradients + self.optimizer + self.activations + self.logits


def estimate_memory(
    settings: MemorySettings,
    count: ParameterCount,
    *,
    num_layers: int,
    vocab_size: int,
    activation_bytes: int,
    kept_copies_bytes: int,
) -> Memory:
    """Adds up.

    Args:
        settings: What is spread how.
        count: Parameters of the model.
        num_layers: Its layers.
        vocab_size: Rows of its head.
        activation_bytes: Kept by the forward pass of a micro-batch.
        kept_copies_bytes: Copies of unsharded weights in the precision of the products.
    """
    shards = settings.shards
    gradients = FLOAT32_BYTES * count.total // shards
    if settings.sharding == "none" and settings.num_devices > 1:
        gradients *= 2  # DDP exchanges gradients through buckets of their size
    return Memory(
        weights=FLOAT32_BYTES * count.total // shards,
        weight_copies=_weight_copies(settings, count, num_layers, kept_copies_bytes),
        gradients=gradients,
        optimizer=optimizer_bytes(settings.optimizer, count, num_layers) // shards,
        activations=activation_bytes,
        logits=_logits(settings, vocab_size),
    )


def optimizer_bytes(optimizer: str, count: ParameterCount, num_layers: int) -> int:
    """Bytes of optimizer state of the whole model."""
    total = MOMENT_BYTES[optimizer] * count.total
    return total - FLOAT32_BYTES * num_layers * count.per_layer if optimizer == "muon" else total


def _weight_copies(settings: MemorySettings, count: ParameterCount, num_layers: int, kept_copies_bytes: int) -> int:
    if settings.shards == 1:
        return kept_copies_bytes
    if settings.sharding == "grad":
        return settings.product_bytes * count.total
    # Embedding, last norm and head are one unit, which stays whole from the first layer's pass to its backward pass.
    outer = count.total - num_layers * count.per_layer
    return settings.product_bytes * (UNSHARDED_LAYERS * count.per_layer + outer)


def _logits(settings: MemorySettings, vocab_size: int) -> int:
    """Logits, their float32 copy and the gradient that takes its place; `chunked` makes a few rows at a time."""
    per_number = settings.product_bytes + 2 * FLOAT32_BYTES
    kernels = {"flash": settings.product_bytes + FLOAT32_BYTES, "plain": per_number}
    if settings.loss_implementation in kernels:
        return kernels[settings.loss_implementation] * settings.micro_batch_tokens * vocab_size
    return per_number * min(settings.loss_chunk_tokens, settings.micro_batch_tokens) * vocab_size
