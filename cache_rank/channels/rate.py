"""A slower link than there is, for tests and figures."""

from __future__ import annotations

import os
import threading
import time

LINK_GBPS_VARIABLE = "CACHE_RANK_LINK_GBPS"
"""Set to a number, this variable lets prompts come back as over a link of so many Gbit/s."""


class RateLimit:
    """Lets what is sent wait until a link of this speed would have carried it.

    Threads may share it, and take turns.
    """

    def __init__(self, gbps: float | None, slack: float = 0.0) -> None:
        """Begin; a sender that was late by up to `slack` seconds may catch up."""
        self._seconds_a_byte = 8e-9 / gbps if gbps else 0.0
        self._carried = 0.0
        self._slack = slack
        self._lock = threading.Lock()

    @classmethod
    def of_environment(cls, slack: float = 0.0) -> RateLimit:
        """The limit that the environment sets, if any.

        Raises:
            ValueError: it is no positive number.
        """
        if (text := os.environ.get(LINK_GBPS_VARIABLE)) is None:
            return cls(None)
        try:
            gbps = float(text)
        except ValueError:
            gbps = 0.0
        if not gbps > 0:
            raise ValueError(f"{LINK_GBPS_VARIABLE}={text}: no positive number of Gbit/s")
        return cls(gbps, slack)

    def bytes_in(self, seconds: float) -> int:
        """How many bytes such a link carries; very many where there is no limit."""
        return int(seconds / self._seconds_a_byte) if self._seconds_a_byte else 1 << 40

    def wait(self, sent_bytes: int) -> None:
        """Wait until so many bytes more are carried."""
        with self._lock:
            now = time.monotonic()
            begins = max(now - self._slack, self._carried)
            ends = self._carried = begins + sent_bytes * self._seconds_a_byte
        time.sleep(max(0.0, ends - now))
