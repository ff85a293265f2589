"""Freed memory is kept where the program asks for it, and nowhere else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, sys
if sys.argv[1] == "kept":
    import olmo_hf.allocator
import torch
def touch():
    for _ in range(20):
        torch.ones(16 * 2**20 // 4)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ROOT = Path(__file__).resolve().parent.parent


def faults(how, **environment):
    """Page faults of making and dropping twenty tensors of 16 MiB, once the same has been done before."""
    # The threshold is fixed, or glibc itself would raise it to what was freed first.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", **environment}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's allocator is told")
def test_memory_is_faulted_in_once():
    """At least 20 faults a round where nothing is kept, even with pages as large as a tensor's eighth."""
    without = faults("as it was")
    assert without > 100
    assert faults("kept") < without / 10
    assert faults("kept", OLMO_HF_KEEP_MEMORY="0") > 100
