"""Keeps freed memory for the next tensor instead of giving it back to the system; acts when it is imported.

glibc returns every large block to the kernel as soon as a tensor dies, and the next tensor of the same size is faulted
in again page by page, hundreds of thousands of pages a step. Here freed memory stays with the process: it holds on to
the most it ever needed, which the next step needs again. (Huge pages, which torch can ask for, were measured and left
out: `docs/log.md`.)

`OLMO_HF_KEEP_MEMORY=0` leaves everything as it was, and so does an allocator other than glibc's.
"""

import ctypes
import os
import sys

VARIABLE = "OLMO_HF_KEEP_MEMORY"

# Parameters of mallopt(3), by their numbers in malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4

_NEVER_TRIM = 2**31 - 1
"""Bytes free at the top of the heap before they are given back; the argument is a C int."""

_GROW_BY = 64 * 2**20
"""Bytes by which the heap grows: few calls of the kernel."""


def keep_freed_memory() -> bool:
    """Switch to keeping, for this process and those that it starts by fork.

    Returns:
        Whether glibc did as told. Where it did not, or is not there, nothing has changed.
    """
    if os.environ.get(VARIABLE) == "0" or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    settings = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: _NEVER_TRIM, _M_TOP_PAD: _GROW_BY}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])


keep_freed_memory()
