"""What a call allocates, from the profiler's record of the allocator: it sees inside operators, as a dispatch mode
does not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    largest: int  # bytes of the largest block
    peak: int  # most bytes held at once, beyond what was held before


def allocations(function: Callable[[], Any]) -> tuple[Allocations, Any]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = largest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        largest = max(largest, event.nbytes())
        held += event.nbytes()
        peak = max(peak, held)
    assert events, "the profiler recorded no allocation"
    return Allocations(largest, peak), result
