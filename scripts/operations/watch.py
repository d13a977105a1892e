"""What a running server and its processes look like from outside, sampled while it is in use."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from typing import NamedTuple

import psutil

from scripts.shared.serving import Client, ServerError

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_WEIGHINGS = 1.0

CACHE_RANK = "cache-rank-"
"""The title of a cache-rank process begins so."""

GROWTH, GROWTH_BYTES = 0.05, 64 << 20
"""Memory is flat if its median rises by no more than this share, and this beside it."""


class Memory(NamedTuple):
    """Resident bytes of one rank: medians of the second and of the last quarter of the samples."""

    early: float
    late: float

    @classmethod
    def of(cls, samples: list[int]) -> Memory:
        """Read off samples at equal distances; zero if there are none."""
        quarter = len(samples) // 4
        if not quarter:
            return cls(0, 0)
        return cls(
            statistics.median(samples[quarter : 2 * quarter]),
            statistics.median(samples[-quarter:]),
        )

    @property
    def flat(self) -> bool:
        """Whether it has not grown beyond what allocators keep."""
        return self.late <= (1 + GROWTH) * self.early + GROWTH_BYTES

    def __str__(self) -> str:
        return f"{self.early / 2**20:.0f} → {self.late / 2**20:.0f} MiB"


class Watch:
    """A thread that notes when the cache rank is down, and how much memory both ranks take.

    Attributes:
        outages: seconds of each time that the cache rank was down and came back.
    """

    def __init__(self, client: Client, pid: int) -> None:
        """Begin to watch a server whose first process has this pid."""
        self.outages: list[float] = []
        self._client = client
        self._root = psutil.Process(pid)
        self._is_up = True
        self._inference: list[int] = []
        self._cache_rank: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def memories(self, with_cache_rank: bool) -> dict[str, Memory]:
        """Of all processes of SGLang together, and of the cache rank, whichever process it is."""
        found = {"inference rank": Memory.of(self._inference)}
        if with_cache_rank:
            found["cache rank"] = Memory.of(self._cache_rank)
        return found

    def stop(self) -> None:
        """Watch no more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        down_since: float | None = None
        weighed = 0.0
        while not self._stopping.wait(SECONDS_BETWEEN_LOOKS):
            now = time.monotonic()
            with contextlib.suppress(ServerError, KeyError):  # a dead server is noticed elsewhere
                up = self._is_up = bool(self._client.metrics()["sglang_cache_rank_up"])
                if not up and down_since is None:
                    down_since = now
                if up and down_since is not None:
                    self.outages.append(now - down_since)
                    down_since = None
            if now - weighed >= SECONDS_BETWEEN_WEIGHINGS:
                self._weigh()
                weighed = now

    def _weigh(self) -> None:
        if not self._is_up:  # one that starts has no name yet, and has not loaded what it needs
            return
        inference = cache_rank = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    taken = process.memory_info().rss
                    if " ".join(process.cmdline()).startswith(CACHE_RANK):
                        cache_rank += taken
                    else:
                        inference += taken
        self._inference.append(inference)
        if cache_rank:
            self._cache_rank.append(cache_rank)
