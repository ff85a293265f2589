"""Importing this makes a launch train once for each of `VARIANTS`, with these words more, and count collectives.

What rank 0 counted is written to the file `COUNTS`.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

import train_hf
from olmo_hf.distributed import rank

COUNTED = ("FSDP::all_gather", "FSDP::post_backward_reduce", "c10d::allreduce_")
main = train_hf.main


def counted(words: Sequence[str]) -> int:
    """Takes the place of `train_hf.main`."""
    found = []
    for more in json.loads(os.environ["VARIANTS"]):
        with profile(activities=[ProfilerActivity.CPU]) as recorder:
            assert train_hf.run_and_report(main, [*words, *more]) == 0
        names = [event.name().split(" ")[0] for event in recorder.profiler.kineto_results.events()]
        found.append({name: names.count(name) for name in COUNTED})
    if rank() == 0:
        Path(os.environ["COUNTS"]).write_text(json.dumps(found))
    return 0


train_hf.main = counted
