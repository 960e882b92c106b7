"""Times of what a GPU does, by its own events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def median_on_gpu(run: Callable[[], object], repetitions: int = 30) -> float:
    """Milliseconds, by events; the device sleeps first, so that the host's time for a launch stays out of it."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_500_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
