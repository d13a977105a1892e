"""Wait for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> float:
    """Wait for a condition; returns how long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - started
