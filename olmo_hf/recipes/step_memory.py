"""The memory of one training step, followed operation by operation on tensors that have shapes but no content.

Forward, loss and backward of the real model run once; every storage they make is counted from its first operation to
its last reference. What FSDP does around the units of the model is added as it does it: weights gathered before a unit
runs and freed after, gradients put into the buffer of the reduction when a unit is through its backward pass.

Shapes: `B` batch, `S` sequence.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from olmo_hf.model.activation_checkpointing import apply_activation_checkpointing
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.loss_in_model import loss_settings, model_loss_sums

Sharding = Literal["full", "grad", "none"]
"""Over all devices: `full`: weights, gradients and optimizer (FSDP). `grad`: the same, but gathered weights stay until
the backward pass. `none`: nothing (DDP, or one device)."""

FLOAT32_BYTES = 4

_ONE_MORE_INPUT = {torch.ops.aten.logsumexp.default}
"""Operations whose kernels hold something of the size of their input for themselves: exp(x - max) here."""

# Without a mask function under this name no mask is made: causal attention that keeps q, k, v and its output, as the
# fused kernels do.
_ATTENTION = "olmo_hf_fused_causal"
AttentionInterface.register(_ATTENTION, sdpa_attention_forward)


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What the memory of a step depends on beside the model.

    Attributes:
        micro_batch: Instances of one forward pass.
        sequence_length: Tokens of an instance.
        half: Whether products run in bfloat16 (or float16).
        activation_checkpointing: `model.activation_checkpointing`.
        loss_implementation: `training.loss_implementation`.
        loss_chunk_tokens: Positions whose logits exist at once.
        sharding: What is spread over the devices of a shard group.
        shards: Devices of a shard group.
        accumulates: Whether a step has several micro-batches, so that gradients are there while activations are.
        defers_reduction: Whether FSDP keeps whole gradients until the last micro-batch.
        layers_per_unit: Layers that FSDP gathers and reduces together.
        into_buckets: Whether gradients go into the buckets of DDP, which are counted elsewhere.
        inside_kernels: Whether what kernels hold for themselves is counted, which trackers of torch do not see.
    """

    micro_batch: int
    sequence_length: int
    half: bool
    activation_checkpointing: str | None
    loss_implementation: str
    loss_chunk_tokens: int
    sharding: Sharding
    shards: int
    accumulates: bool
    defers_reduction: bool = False
    layers_per_unit: int = 1
    into_buckets: bool = False
    inside_kernels: bool = True

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP is at work; a single device has nothing to share."""
        return self.sharding != "none"

    @property
    def product_bytes(self) -> int:
        """Bytes of a number in matrix products."""
        return 2 if self.half else FLOAT32_BYTES


@dataclass(frozen=True)
class StepMemory:
    """Bytes at the moment of a step at which most are held; weights of one's own and the optimizer are not counted."""

    gathered_weights: int = 0
    """Weights of other devices, and the buffers they come in."""

    reduction_buffers: int = 0
    """Gradients on their way to other devices."""

    gradients: int = 0
    activations: int = 0
    """Kept by the layers for the backward pass, and copies of weights in the precision of the products."""

    logits_and_rest: int = 0
    """What head and loss need, and what one operation hands to the next."""

    kept_by_layers: int = 0
    """Activations when the head begins; not in the total."""

    @property
    def total(self) -> int:
        return (
            self.gathered_weights + self.reduction_buffers + self.gradients + self.activations + self.logits_and_rest
        )


class _Ledger(TorchDispatchMode):
    """Counts storages from when an operation makes them until nobody holds them, and remembers the fullest moment."""

    def __init__(self, not_counted: set[int], *, inside_kernels: bool):
        super().__init__()
        self._not_counted = not_counted
        self._hungry = _ONE_MORE_INPUT if inside_kernels else set()
        self._seen: set[int] = set()
        self.live = 0
        self.kept_by_layers = 0
        self.state = StepMemory()
        self.peak = StepMemory()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._hungry:
            self.live += args[0].numel() * args[0].element_size()
            self.look()
            self.live -= args[0].numel() * args[0].element_size()
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, out)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or key in self._not_counted:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self.live += size
        weakref.finalize(storage, self._free, key, size)
        self.look()

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    def change(self, **by: int) -> None:
        """Add to what is held beside the storages of operations."""
        self.state = replace(self.state, **{name: getattr(self.state, name) + size for name, size in by.items()})
        self.look()

    def look(self) -> None:
        """Is this the fullest moment so far?"""
        if self.state.total + self.live > self.peak.total:
            activations = min(self.live, self.kept_by_layers)
            self.peak = replace(self.state, activations=activations, logits_and_rest=self.live - activations)


class _Unit:
    """Parameters that FSDP gathers and reduces together."""

    def __init__(self, modules: list[nn.Module], *, keeps: bool):
        self.modules = modules
        self.keeps = keeps  # gathered weights stay until the backward pass
        unique = {id(p): p for module in modules for p in module.parameters()}
        self.parameters = list(unique.values())
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        self.missing = len(self.parameters)  # gradients that are still to come
        self.is_gathered = False


class _Sharding:
    """What FSDP2 holds beside the tensors of operations: gathered weights, and the buffers of both directions."""

    def __init__(self, ledger: _Ledger, settings: StepSettings, units: list[_Unit]):
        self.ledger, self.settings, self.units = ledger, settings, units
        self._flat = self._scattered = 0
        for unit in units:
            unit.modules[0].register_forward_pre_hook(self._before(unit))
            unit.modules[-1].register_forward_hook(self._after(unit))
            for parameter in unit.parameters:
                parameter.register_post_accumulate_grad_hook(self._gradient(unit))

    def gather(self, unit: _Unit, *, forward: bool) -> None:
        """One buffer for what comes from everybody, then the weights copied out of it.

        In the forward pass the buffer is kept until the next one comes, so that no stream has to wait.
        """
        if unit.is_gathered:
            return
        unit.is_gathered = True
        size = self.settings.product_bytes * unit.numel
        self.ledger.change(gathered_weights=size)
        self.ledger.change(gathered_weights=size - self._flat)
        self._flat = size
        if not forward:
            self.ledger.change(gathered_weights=-size)
            self._flat = 0

    def free(self, unit: _Unit) -> None:
        """The unit's gathered weights are given back."""
        if unit.is_gathered:
            unit.is_gathered = False
            self.ledger.change(gathered_weights=-self.settings.product_bytes * unit.numel)

    def _before(self, unit: _Unit) -> Callable[..., None]:
        return lambda module, args: self.gather(unit, forward=not torch._C._current_graph_task_id() >= 0)

    def _after(self, unit: _Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            recomputing = torch._C._current_graph_task_id() >= 0
            if not unit.keeps and not recomputing:
                self.free(unit)
            tensor = out if isinstance(out, torch.Tensor) else out[0]
            if tensor.requires_grad and not recomputing:
                tensor.register_hook(lambda grad: self._backward_begins(unit))

        return hook

    def _backward_begins(self, unit: _Unit) -> None:
        self.gather(unit, forward=False)
        before = self.units.index(unit) - 1
        if before >= 0:  # fetched ahead
            self.gather(self.units[before], forward=False)

    def _gradient(self, unit: _Unit) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            unit.missing -= 1
            if unit.missing == 0:
                self._reduce(unit)

        return hook

    def _reduce(self, unit: _Unit) -> None:
        self.free(unit)
        size = FLOAT32_BYTES * unit.numel
        if not (self.settings.defers_reduction and self.settings.accumulates):  # else whole ones are counted already
            self.ledger.change(reduction_buffers=size - self._scattered)  # the last one's buffer goes when this comes
            self._scattered = size
            part = size // self.settings.shards
            self.ledger.change(gradients=part)
            if self.settings.accumulates:  # added to what is there, then gone
                self.ledger.change(gradients=-part)
        for parameter in unit.parameters:
            parameter.grad = None
        if unit is self.units[0]:
            self.ledger.change(reduction_buffers=-self._scattered)
            self._scattered = 0


def step_memory(config: OlmoHfConfig, settings: StepSettings) -> StepMemory:
    """The fullest moment of a micro-batch (of the last one, where a step has several)."""
    config = OlmoHfConfig(**config.to_init_dict())
    config._attn_implementation = "sdpa" if config.position_embedding == "alibi" else _ATTENTION
    with torch.device("meta"):
        model = OlmoHfForCausalLM(config)
    if settings.activation_checkpointing is not None:
        apply_activation_checkpointing(model, settings.activation_checkpointing)
    if settings.is_sharded and settings.half:
        nn.Module.to(model, torch.bfloat16)  # FSDP gathers weights in the precision of the products
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        model.train()
        return _follow(model, settings)


def _follow(model: OlmoHfForCausalLM, settings: StepSettings) -> StepMemory:
    shape = settings.micro_batch, settings.sequence_length
    ids = torch.zeros(shape, dtype=torch.long)  # (B, S)
    counted_elsewhere = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    own = counted_elsewhere | {ids.untyped_storage()._cdata}
    ledger = _Ledger(own, inside_kernels=settings.inside_kernels)
    whole = FLOAT32_BYTES * sum(parameter.numel() for parameter in model.parameters())
    if settings.accumulates:
        deferred = settings.defers_reduction and settings.is_sharded
        ledger.change(gradients=whole if deferred or not settings.is_sharded else whole // settings.shards)
    head = model.get_output_embeddings()
    assert head is not None
    head.register_forward_pre_hook(lambda module, args: setattr(ledger, "kept_by_layers", ledger.live))
    if settings.is_sharded:
        _Sharding(ledger, settings, _units(model, settings))
    else:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_keep_gradient(ledger, settings))
    implementation = {"plain": "plain", "flash": "plain"}.get(settings.loss_implementation, "chunked")
    loss = loss_settings(
        model, implementation=implementation, z_loss_weight=1e-5, chunk_tokens=settings.loss_chunk_tokens
    )
    with ledger:
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.half):
            terms, outputs = model_loss_sums(model, {"input_ids": ids, "use_cache": False}, ids, loss)
        total = terms.total
        del terms, outputs
        total.backward()
    return replace(ledger.peak, kept_by_layers=ledger.kept_by_layers)


def _units(model: OlmoHfForCausalLM, settings: StepSettings) -> list[_Unit]:
    """As Accelerate cuts the model: the embedding, every layer, and the last norm with the head."""
    keeps = settings.sharding == "grad"
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    each, together = settings.layers_per_unit, list(model.model.layers)
    layers = [_Unit(together[i : i + each], keeps=keeps) for i in range(0, len(together), each)]
    if model.config.tie_word_embeddings:
        return [_Unit([embedding, model.model.norm, head], keeps=True), *layers]
    return [_Unit([embedding], keeps=keeps), *layers, _Unit([model.model.norm, head], keeps=True)]


def _keep_gradient(ledger: _Ledger, settings: StepSettings) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        size = FLOAT32_BYTES * parameter.numel()
        parameter.grad = None  # from now on it is counted as a gradient, or was from the beginning
        if settings.into_buckets:
            ledger.change(gradients=-size if settings.accumulates else 0)
        elif not settings.accumulates:
            ledger.change(gradients=size)

    return hook
