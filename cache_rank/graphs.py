"""Work that is queued again and again, captured in CUDA graphs: one launch instead of many."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

MOST_KEYS = 4096
"""When there are more keys, all graphs are dropped: some key changes that should not."""

CAPTURES_A_STEP = 4
"""A step captures no more graphs than this: a capture takes the host longer than the work does."""


def capture(
    action: Callable[[], Any], stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Capture what an action queues on the current stream, to be replayed on any.

    The action has run before, so that its kernels are compiled. It waits for no other stream, and
    what it reads and writes stays where it is; what it allocates, the graph keeps. Other streams,
    and other threads of the process, may use the device meanwhile, but none may wait for all of it.
    `stream` is the current one inside, where it matters; it must not be the default one.
    """
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(stream or torch.cuda.Stream()),  # the default one cannot be captured
        _no_garbage_collection(),  # it may free memory or graphs, and so end the capture
    ):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            action()
        finally:
            graph.capture_end()
    return graph


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaGraphCache:
    """Runs actions, on a GPU from graphs."""

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        # Torch hands out 32 streams in turn: a new one now and then would be another thread's.
        self._stream = torch.cuda.Stream(device) if self._captures else None
        self._left = 0
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def allow_more(self) -> None:
        """Allow a few more captures: a step begins."""
        self._left = CAPTURES_A_STEP

    def run(self, key: Hashable, *actions: Callable[[], None]) -> None:
        """Do what actions do, one after the other; see `capture` for what they must be like.

        Actions of the same key do the same, with the same memory. They run as they are at first,
        which compiles their kernels, and are captured later.
        """

        def act() -> None:
            for action in actions:
                action()

        if key in self._seen and key not in self._graphs and self._left:
            self._left -= 1
            self._graphs[key] = capture(act, self._stream)
        if key in self._graphs:
            self._graphs[key].replay()
            return
        if self._captures and key not in self._seen:
            if len(self._seen) >= MOST_KEYS:
                self.clear()
            self._seen.add(key)
        act()

    def clear(self) -> None:
        """Forget all graphs: what they read or write has moved."""
        if self._graphs:
            torch.cuda.synchronize()  # none of them is running
        self._graphs.clear()
        self._seen.clear()
