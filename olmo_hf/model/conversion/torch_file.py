"""A `.pt` file that is written tensor by tensor.

`torch.save` wants all tensors in memory at once. Here it writes the file with holes in place of the numbers; then the
file is mapped into memory and each tensor is copied into its hole.
"""

import mmap
from pathlib import Path
from typing import Any

import torch

from olmo_hf.model.conversion.lazy import LazyTensor


def write_torch_file(path: Path, content: Any) -> None:
    """Write what `torch.save` would write of `content`, one tensor in memory at a time.

    The checksums of the zip archive stay 0: no release of torch looks at them, `unzip` complains.

    Args:
        path: the file.
        content: dictionaries, lists and plain values, with a `LazyTensor` wherever the file has a tensor.
    """
    with torch.serialization.skip_data():
        torch.save(_with_holes(content), path)  # the tensors are memory that nobody touches
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    _fill(mapped, content)


def _with_holes(content: Any) -> Any:
    if isinstance(content, LazyTensor):
        return torch.empty(content.shape, dtype=content.dtype)
    if isinstance(content, dict):
        return {key: _with_holes(value) for key, value in content.items()}
    return [_with_holes(value) for value in content] if isinstance(content, list) else content


def _fill(mapped: Any, content: Any) -> None:
    if isinstance(content, LazyTensor):
        mapped.copy_(content.read())
    elif isinstance(content, dict):
        for key, value in content.items():
            _fill(mapped[key], value)
    elif isinstance(content, list):
        for part, value in zip(mapped, content, strict=True):
            _fill(part, value)
