"""Memory of one device in training: what is held all the time, the fullest moment of a step, and the update."""

from dataclasses import dataclass, replace

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import ParameterCount, count_parameters
from olmo_hf.recipes.step_memory import FLOAT32_BYTES, StepMemory, StepSettings, step_memory

MOMENT_BYTES = {"adamw": 8, "lion": 4, "muon": 8}
"""Bytes of optimizer state per parameter; `muon` keeps one moment for hidden matrices, see `optimizer_bytes`."""


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """What the memory depends on beside the model.

    Attributes:
        num_devices: Devices.
        optimizer: `training.optimizer`.
        step: What the memory of a step depends on.
    """

    num_devices: int
    optimizer: str
    step: StepSettings


@dataclass(frozen=True)
class Memory:
    """Bytes of one device. What libraries need for themselves and what fragmentation costs is not in it."""

    weights: int
    optimizer: int
    ddp_buckets: int
    """Gradients of the last micro-batch lie in the buckets they are exchanged in, which stay."""

    step: StepMemory
    """The fullest moment of forward and backward pass."""

    update: int
    """Gradients that are held on top of weights, optimizer and buckets while the optimizer, which is fused, works."""

    @property
    def total(self) -> int:
        """The larger of the two moments."""
        return self.weights + self.optimizer + self.ddp_buckets + max(self.step.total, self.update)

    def parts(self) -> dict[str, int]:
        """The summands of the total, by the names of the table."""
        held = {"weights": self.weights, "optimizer": self.optimizer}
        step = self.step
        communication = self.ddp_buckets
        if self.update > step.total:
            return {**held, "gradients and update": self.update, "communication": communication}
        return {
            **held,
            "gradients": step.gradients,
            "gathered weights": step.gathered_weights,
            "communication": communication + step.reduction_buffers,
            "activations": step.activations,
            "logits and loss": step.logits_and_rest,
        }


def estimate_memory(settings: MemorySettings, config: OlmoHfConfig) -> Memory:
    """Follows one step of the model without memory, and adds what is spread over the devices."""
    count, step = count_parameters(config), settings.step
    shards = step.shards if step.is_sharded else 1
    gradients = FLOAT32_BYTES * count.total // shards
    is_ddp = settings.num_devices > 1 and not step.is_sharded
    return Memory(
        weights=FLOAT32_BYTES * count.total // shards,
        optimizer=optimizer_bytes(settings.optimizer, count, config.num_hidden_layers) // shards,
        ddp_buckets=FLOAT32_BYTES * count.total if is_ddp else 0,
        step=step_memory(config, replace(step, into_buckets=is_ddp)),
        update=0 if is_ddp else gradients,
    )


def optimizer_bytes(optimizer: str, count: ParameterCount, num_layers: int) -> int:
    """Bytes of optimizer state of the whole model."""
    total = MOMENT_BYTES[optimizer] * count.total
    return total - FLOAT32_BYTES * num_layers * count.per_layer if optimizer == "muon" else total
