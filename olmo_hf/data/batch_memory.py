"""Where a batch is put together.

Shapes: `B` rows of a batch, `S` tokens of a row.
"""

import torch
from torch.utils.data import get_worker_info


def empty_rows(num_rows: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """A batch tensor to be filled, (B, S).

    In a worker it lies in the memory shared with the process the batch is for; elsewhere `DataLoader` would copy it
    there, which costs as much as reading the tokens.
    """
    if get_worker_info() is None:
        return torch.empty(num_rows, length, dtype=dtype)
    storage = torch.UntypedStorage._new_shared(num_rows * length * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage, 0, (num_rows, length), (length, 1))
