"""How long a GPU takes for work that the host queues."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

HEAD_START_CYCLES = 2_000_000
"""The GPU is kept busy so long, about a millisecond, while the host queues."""


def median_microseconds(action: Callable[[], Any], repeats: int = 20) -> float:
    """Median of what an action takes on the GPU, after two times that warm up."""
    times = []
    for _ in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # Longer than the host takes to queue the action, which is not what is timed.
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        action()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times[2:])
