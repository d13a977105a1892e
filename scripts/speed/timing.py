"""How long a device takes for work that the host queues."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

HEAD_START_CYCLES = 2_000_000
"""The device is kept busy so long, about a millisecond, while the host queues."""


def device_seconds(action: Callable[[], Any], device: torch.device) -> float:
    """How long a device takes for what an action queues."""
    if device.type != "cuda":
        started = time.perf_counter()
        action()
        return time.perf_counter() - started
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # Longer than the host takes to queue the action, which is not what is timed.
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    action()
    stop.record()
    torch.cuda.synchronize()
    return 1e-3 * start.elapsed_time(stop)


def median_microseconds(
    action: Callable[[], Any], repeats: int = 20, device: torch.device | str = "cuda"
) -> float:
    """Median of what an action takes on a device, after two times that warm up."""
    times = [device_seconds(action, torch.device(device)) for _ in range(repeats + 2)]
    return 1e6 * statistics.median(times[2:])
