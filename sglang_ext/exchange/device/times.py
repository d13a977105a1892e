"""When what was queued on streams began and ended, of steps that are traced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from cache_rank.measure.timeline import Span

_UNTIMED = contextlib.nullcontext()


class TransferTimes:
    """Times of what was queued on streams in traced steps: when it began and ended."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._timed: list[tuple[str, int, int, torch.cuda.Event, torch.cuda.Event]] = []

    def choose(self, step: int | None) -> None:
        """Take the times of what is queued next, as of this step; of None, take none."""
        self._step = step

    @property
    def are_taken(self) -> bool:
        """Whether the current step is traced."""
        return self._step is not None

    def of(
        self,
        name: str,
        group: int,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """Time what is queued inside on a stream, from when an event has happened."""
        step = self._step
        return _UNTIMED if step is None else self._time(name, step, group, stream, after)

    @contextlib.contextmanager
    def _time(
        self,
        name: str,
        step: int,
        group: int,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event | None,
    ) -> Iterator[None]:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if after is not None:
            stream.wait_event(after)
        start.record(stream)
        yield
        stop.record(stream)
        self._timed.append((name, step, group, start, stop))

    def take_spans(self) -> list[Span]:
        """Return the times so far, and wait for the device to be done with them."""
        timed, self._timed = self._timed, []
        torch.cuda.synchronize()
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        host = time.monotonic_ns() / 1e3
        return [
            Span(
                name,
                host - 1e3 * start.elapsed_time(now),
                host - 1e3 * stop.elapsed_time(now),
                step,
                group,
                lane=name,
            )
            for name, step, group, start, stop in timed
        ]
