"""Models that are spread over ranks before they have memory, so that none of it ever lies whole on one rank."""

from collections.abc import Callable
from typing import Any, cast

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from olmo_hf.errors import ConfigError
from olmo_hf.training.parameter_groups import parameter_name

Fill = Callable[[nn.Module], None]
"""Gives every parameter its first value, on each rank the part that it holds."""


def has_no_memory(model: nn.Module) -> bool:
    """Whether the model was made on the meta device."""
    return any(parameter.is_meta for parameter in model.parameters())


def shard_without_memory(accelerator: Any, model: nn.Module, *, layers_per_unit: int) -> None:
    """Shards a model without memory in place, as the accelerator's FSDP2 plugin says, and gives each rank its part.

    What is in that memory has no meaning yet.

    Args:
        accelerator: Accelerate's, with an FSDP plugin of version 2.
        model: of transformers.
        layers_per_unit: consecutive layers that are gathered and reduced together.

    Raises:
        ConfigError: nothing shards the model, or Accelerate would have to change it first.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin is None:
        raise ConfigError(
            "the model has no memory (meta device) and is not sharded; launch with FSDP or build it on the CPU"
        )
    if plugin.activation_checkpointing:
        raise ConfigError(
            "fsdp_config.fsdp_activation_checkpointing: found true in the accelerate config; set "
            "model.activation_checkpointing in the run's YAML instead (whole_layer does the same)"
        )
    if layers_per_unit > 1:
        _group_layers(accelerator, model, layers_per_unit)
    fsdp2_prepare_model(accelerator, model)
    device = torch.device("cpu") if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else accelerator.device
    model.to_empty(device=device)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def _group_layers(accelerator: Any, model: nn.Module, layers_per_unit: int) -> None:
    """Makes units of several layers, which no policy of Accelerate does; it keeps what it finds."""
    plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
    layers = list(cast(Any, model).model.layers)
    for first in range(0, len(layers), layers_per_unit):
        fully_shard(
            layers[first : first + layers_per_unit],
            mesh=mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)] if mesh is not None else None,
            reshard_after_forward=plugin.reshard_after_forward,
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            offload_policy=plugin.cpu_offload,
        )
    plugin.auto_wrap_policy = None  # it would look for layers that are in no unit yet


def restore_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Gives the groups of an optimizer the model's parameters, by name.

    Accelerate finds them again by the addresses of their memory, which all parts without elements share.
    """
    named = {parameter_name(name): parameter for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        if "param_names" in group:
            group["params"] = [named[name] for name in group["param_names"]]
