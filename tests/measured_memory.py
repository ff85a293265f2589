"""Trains a run for a few steps and writes down how much tensor memory it held: a part of benchmarks/plan_memory.py.

python tests/measured_memory.py OUTPUT.json CONFIG.yaml [--section.field=value ...]

Counted are all allocations of torch in this process, as `torch.cuda.max_memory_allocated` would on a GPU, between the
beginning of step 2, when the optimizer has its state, and the end of step 3.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from torch.profiler import ProfilerActivity, profile, record_function  # noqa: E402

import train_hf  # noqa: E402
from olmo_hf.training.flow import SaveSchedule  # noqa: E402

FIRST, LAST = 1, 3
"""Steps completed when the measurement begins and ends."""

_begin, _end = SaveSchedule.on_step_begin, SaveSchedule.on_step_end


def _mark(name: str) -> None:
    with record_function(name):
        pass


def _on_step_begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    if state.global_step == FIRST:
        _mark("measure_from")
    return _begin(self, args, state, control, **kwargs)


def _on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
    if state.global_step == LAST:
        _mark("measure_to")
    return _end(self, args, state, control, **kwargs)


def main() -> int:
    """Train, then write `{rank: {"peak": bytes, "rest": bytes}}`; `rest` is what is held when a step begins."""
    SaveSchedule.on_step_begin, SaveSchedule.on_step_end = _on_step_begin, _on_step_end  # type: ignore[method-assign]
    output, words = Path(sys.argv[1]), sys.argv[2:]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        code = train_hf.run_and_report(train_hf.main, words)
    if code:
        return code
    events = list(recorder.profiler.kineto_results.events())
    marks = {event.name(): event.start_ns() for event in events if event.name().startswith("measure_")}
    held = peak = rest = 0
    memory = [event for event in events if event.name() == "[memory]"]
    for event in sorted(memory, key=lambda event: event.start_ns()):
        held += event.nbytes()
        if event.start_ns() <= marks["measure_from"]:
            rest = held
        elif event.start_ns() <= marks["measure_to"]:
            peak = max(peak, held)
    found = {"peak": peak, "rest": rest}
    Path(f"{output}.rank{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
