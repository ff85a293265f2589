"""Initial weights that depend on the seed and the parameter's name only.

The original draws with one seed on every rank into whatever shard the rank holds, so equal shards start with equal
numbers and the start depends on the sharding. Here every block of rows of every matrix has a generator of its own,
keyed by (seed, name, block): a rank draws the rows it owns, and any number of ranks starts from bitwise the weights of
one process. Draws happen on the CPU in fp32, whatever the device.
"""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from olmo_hf.model.layers_olmo import OlmoHfNorm
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

# Rows per generator. Part of what defines the numbers: another value gives other initial weights.
ROWS_PER_BLOCK = 256

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def draw_block(seed: int, name: str, block: int, shape: tuple[int, ...], cutoff: float | None) -> np.ndarray:
    """Standard normal numbers, redrawn while beyond `cutoff`, for rows `block * ROWS_PER_BLOCK` and on. fp32."""
    key = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    values = generator.standard_normal(shape, dtype=np.float32)
    if cutoff is not None:
        outside = np.abs(values) > cutoff
        while outside.any():
            values[outside] = generator.standard_normal(int(outside.sum()), dtype=np.float32)
            outside = np.abs(values) > cutoff
    return values


def draw_rows(
    seed: int, name: str, shape: tuple[int, ...], rows: range, cutoff: float | None
) -> Iterator[tuple[range, np.ndarray]]:
    """Yield (rows, values) covering `rows` of the full matrix of `shape`; values have the full width."""
    if not rows:
        return
    for block in range(rows.start // ROWS_PER_BLOCK, (rows.stop - 1) // ROWS_PER_BLOCK + 1):
        first, last = block * ROWS_PER_BLOCK, min((block + 1) * ROWS_PER_BLOCK, shape[0])
        values = draw_block(seed, name, block, (last - first, *shape[1:]), cutoff)
        kept = range(max(first, rows.start), min(last, rows.stop))
        yield kept, values[kept.start - first : kept.stop - first]


def plain_name(name: str) -> str:
    """The name of a parameter or module without what compilation, recomputation and FSDP put into it."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def local_slice(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """The part of a parameter that this rank holds, and where it lies in the full tensor."""
    if not isinstance(parameter, DTensor):
        return parameter, tuple(slice(0, n) for n in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


@torch.no_grad()
def initialize_weights(model: OlmoHfForCausalLM, seed: int) -> None:
    """Fill every parameter in place by the rule of `config.init_method`; sharded (DTensor) parameters too.

    Parameters on the meta device must have been given memory before (`model.to_empty(device=...)`).

    Args:
        model: the whole model, possibly under FSDP2.
        seed: equal seeds give equal weights for every number of ranks and every device.
    """
    model.tie_weights()  # to_empty separates tied weights
    cutoff = model.config.init_cutoff
    for module_name, module in model.named_modules():
        name = plain_name(module_name)
        if isinstance(module, OlmoHfNorm):
            if module.weight is not None:
                local_slice(module.weight)[0].fill_(1.0)
            if module.bias is not None:
                local_slice(module.bias)[0].zero_()
        elif isinstance(module, nn.Linear | nn.Embedding):
            tied = name == "lm_head" and model.config.tie_word_embeddings
            if not tied:
                std = model.config.initial_std(name, module.weight.shape[1])
                _fill(module.weight, f"{name}.weight", seed, std, cutoff)
            if isinstance(module, nn.Linear) and module.bias is not None:
                local_slice(module.bias)[0].zero_()


def _fill(parameter: torch.Tensor, name: str, seed: int, std: float, cutoff: float | None) -> None:
    local, (rows, *others) = local_slice(parameter)
    for kept, values in draw_rows(seed, name, tuple(parameter.shape), range(rows.start, rows.stop), cutoff):
        block = torch.from_numpy(values * np.float32(std))[(slice(None), *others)]
        local[kept.start - rows.start : kept.stop - rows.start].copy_(block)
