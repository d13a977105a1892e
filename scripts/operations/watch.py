"""What a running server and its processes look like from outside, sampled while it is in use."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import Counter
from typing import NamedTuple

import psutil

from scripts.shared.serving import Server, ServerError

SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_WEIGHINGS = 1.0

CACHE_RANK, INFERENCE_RANK = "cache rank", "inference rank"

TITLE = "cache-rank-"
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
        early, late = samples[quarter : 2 * quarter], samples[-quarter:]
        return cls(statistics.median(early), statistics.median(late))

    @property
    def flat(self) -> bool:
        """Whether it has not grown beyond what allocators keep."""
        return self.late <= (1 + GROWTH) * self.early + GROWTH_BYTES

    def __str__(self) -> str:
        return f"{self.early / 2**20:.0f} → {self.late / 2**20:.0f} MiB"


class Watch:
    """A thread that notes when the cache rank is down, and how much memory both ranks take."""

    def __init__(self, server: Server, with_cache_rank: bool) -> None:
        """Begin to watch a server."""
        self.outages: list[float] = []  # seconds until a cache rank was back
        self._client = server
        self._root = psutil.Process(server.process.pid)
        self._is_up = True
        ranks = (INFERENCE_RANK, CACHE_RANK) if with_cache_rank else (INFERENCE_RANK,)
        self._samples: dict[str, list[int]] = {rank: [] for rank in ranks}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def memories(self) -> dict[str, Memory]:
        """Of all processes of SGLang together, and of the cache rank, whichever process it is."""
        return {rank: Memory.of(samples) for rank, samples in self._samples.items()}

    def close(self) -> None:
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
        taken: Counter[str] = Counter()
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (self._root, *self._root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    of_cache_rank = " ".join(process.cmdline()).startswith(TITLE)
                    rank = CACHE_RANK if of_cache_rank else INFERENCE_RANK
                    taken[rank] += process.memory_info().rss
        for rank, size in taken.items():
            self._samples[rank].append(size)
