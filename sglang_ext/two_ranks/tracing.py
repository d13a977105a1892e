"""`--trace FILE`: the timeline of a few decode steps, both ranks on one clock.

The steps are consecutive ones in which some request is sparse, after a few to warm up. The cache
rank appends its own spans to the same file.
"""

from __future__ import annotations

import logging

from cache_rank.measure.timeline import TraceFile
from sglang_ext.two_ranks.exchange.base import Exchange

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 32
"""The first so many sparse steps are not traced."""

_SETTLE_STEPS = 8
"""The trace is written so many steps later: on a GPU the host runs ahead of the times it reads."""


class Tracer:
    """Chooses the steps that are traced and writes what the exchange saw of them."""

    def __init__(self, path: str, steps: int) -> None:
        self._file = TraceFile(path, "inference")
        self._file.begin()
        self._path = path
        self._steps = steps
        self._sparse_steps = 0

    def wants(self, sparse_requests: int) -> bool:
        self._sparse_steps += sparse_requests > 0
        done = self._sparse_steps - WARM_UP_STEPS
        return sparse_requests > 0 and 0 < done <= self._steps

    def write_when_done(self, exchange: Exchange) -> None:
        if self._sparse_steps == WARM_UP_STEPS + self._steps + _SETTLE_STEPS:
            self._sparse_steps += 1  # once
            self._file.write(exchange.spans())
            logger.info("cache rank: the trace of %d steps is in %s", self._steps, self._path)
