"""Whole tables of tensors from the original's names to ours and back: weights and optimizer state."""

from collections.abc import Iterable

import torch

from olmo_hf.errors import ConversionError
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.conversion.lazy import LazyTable, LazyTensor
from olmo_hf.model.conversion.tensor_names import TensorEntry

# Running norms of adaptive clipping belong to the original's fused tensors; there is no such number for a part of one.
CLIPPING_MEMORY = "grad_norm_exp_avg"


def weights_to_ours(weights: LazyTable, entries: list[TensorEntry]) -> LazyTable:
    """Split fused tensors and rename.

    Raises:
        ConversionError: tensors missing, left over, or of another length than the configuration says.
    """
    _compare(weights.keys(), [entry.original for entry in entries])
    table: LazyTable = {}
    for entry in entries:
        table |= _split(entry, weights[entry.original])
    return table


def weights_to_original(weights: LazyTable, entries: list[TensorEntry]) -> LazyTable:
    """Fuse and rename; the inverse of `weights_to_ours`, with the same errors."""
    _compare(weights.keys(), [name for entry in entries for name in entry.ours])
    return {entry.original: _fuse(entry, [weights[name] for name in entry.ours]) for entry in entries}


def optimizer_to_ours(state: LazyTable, entries: list[TensorEntry]) -> tuple[LazyTable, list[str]]:
    """Optimizer state `{parameter}.{key}` by our names.

    Returns:
        The table, and a notice for everything that could not come along.
    """
    table: LazyTable = {}
    dropped = 0
    by_name = {entry.original: entry for entry in entries}
    for name, tensor in state.items():
        parameter, key = name.rsplit(".", 1)
        if parameter not in by_name:
            raise ConversionError(
                f"{name}: optimizer state of an unknown parameter; leave the optimizer out with --no-optimizer"
            )
        if key == CLIPPING_MEMORY:
            dropped += 1
            continue
        entry = by_name[parameter]
        if tensor.shape in ((), (1,)):
            table |= {f"{part}.{key}": tensor for part in entry.ours}
        else:
            table |= {f"{part}.{key}": piece for part, piece in _split(entry, tensor).items()}
    notices = []
    if dropped:
        notices.append(f"the running norms of adaptive clipping ({dropped} numbers, one per fused tensor) start anew")
    return table, notices


def optimizer_to_original(state: LazyTable, entries: list[TensorEntry]) -> LazyTable:
    """Optimizer state `{parameter}.{key}` by the original's names; numbers such as `step` must agree among the parts.

    Raises:
        ConversionError: a part of a fused tensor has no state, or numbers differ.
    """
    keys: dict[str, list[str]] = {}
    for name in state:
        parameter, key = name.rsplit(".", 1)
        keys.setdefault(parameter, []).append(key)
    table: LazyTable = {}
    for entry in entries:
        for key in keys.get(entry.ours[0], []):
            missing = [part for part in entry.ours if f"{part}.{key}" not in state]
            if missing:
                raise ConversionError(
                    f"{', '.join(missing)}: no optimizer state {key}, which {entry.original} needs; leave the "
                    "optimizer out with --no-optimizer"
                )
            parts = [state[f"{part}.{key}"] for part in entry.ours]
            if parts[0].shape == ():
                if len({float(part.read()) for part in parts}) > 1:
                    raise ConversionError(
                        f"{', '.join(entry.ours)}: {key} differs among them, and {entry.original} can have only one; "
                        "leave the optimizer out with --no-optimizer"
                    )
                table[f"{entry.original}.{key}"] = parts[0]
            else:
                table[f"{entry.original}.{key}"] = _fuse(entry, parts)
    return table


def trim_vocabulary(table: LazyTable, config: OlmoHfConfig) -> tuple[LazyTable, OlmoHfConfig]:
    """Cut the padding rows of embedding and head off; optimizer tables are cut alike."""
    rows = config.tokenizer_vocab_size
    if rows is None or rows == config.vocab_size:
        return table, config
    trimmed = {
        name: tensor.map_rows(slice(0, rows))
        if name.startswith(("model.embed_tokens.", "lm_head.")) and tensor.shape[:1] == (config.vocab_size,)
        else tensor
        for name, tensor in table.items()
    }
    return trimmed, OlmoHfConfig(**(config.to_init_dict() | {"vocab_size": rows}))


def cast(table: LazyTable, dtype: torch.dtype) -> LazyTable:
    """Floating-point tensors in another type."""

    def converted(tensor: LazyTensor) -> LazyTensor:
        return LazyTensor(tensor.shape, dtype, lambda: tensor.read().to(dtype))

    return {name: converted(tensor) if tensor.dtype.is_floating_point else tensor for name, tensor in table.items()}


def _split(entry: TensorEntry, tensor: LazyTensor) -> LazyTable:
    if tensor.shape[:1] != (sum(entry.rows),):
        raise ConversionError(
            f"{entry.original}: has shape {tensor.shape}, expected {sum(entry.rows)} rows by the configuration "
            "beside it; give each its own"
        )
    start, parts = 0, {}
    for name, rows in zip(entry.ours, entry.rows, strict=True):
        parts[name] = tensor if len(entry.ours) == 1 else tensor.map_rows(slice(start, start + rows))
        start += rows
    return parts


def _fuse(entry: TensorEntry, parts: list[LazyTensor]) -> LazyTensor:
    rows = tuple(part.shape[0] for part in parts)
    if rows != entry.rows:
        raise ConversionError(
            f"{', '.join(entry.ours)}: have {rows} rows, expected {entry.rows} by the configuration beside them; "
            "give each its own"
        )
    shape = (sum(rows), *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, lambda: entry.fuse([part.read() for part in parts]))


def _compare(found: Iterable[str], expected: list[str]) -> None:
    found = set(found)
    problems = []
    if missing := sorted(set(expected) - found):
        problems.append(f"{len(missing)} tensors are missing ({', '.join(missing[:5])})")
    if unknown := sorted(found - set(expected)):
        problems.append(f"{len(unknown)} tensors have no place in this architecture ({', '.join(unknown[:5])})")
    if problems:
        raise ConversionError(
            f"{'; '.join(problems)}; choose a whole checkpoint, with the configuration of its weights"
        )
