"""What the tests of training share: a measure of memory."""

from collections.abc import Callable

import pytest
from torch.profiler import ProfilerActivity, profile


def _peak_bytes(function: Callable[[], object]) -> int:
    """Largest amount of memory held at one time while `function` runs, by the profiler's record of allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as recorder:
        function()
    held = peak = 0
    events = [event for event in recorder.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """The function that measures the memory a function needs."""
    return _peak_bytes
