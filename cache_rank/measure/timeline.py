"""What a rank did when, as a trace that Perfetto and Chrome read.

Both ranks append to one file, in the JSON array format, whose closing bracket may be missing. Times
are microseconds of the host's monotonic clock, which the ranks share; device times are translated
by reading both clocks once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        name: what took it.
        start, stop: microseconds of the host's monotonic clock.
        step, group: the step and the layer group that it belongs to.
        lane: the row of the rank's display; spans of one lane do not overlap.
    """

    name: str
    start: float
    stop: float
    step: int
    group: int
    lane: str = "compute"


class TraceFile:
    """Appends spans of one rank to a trace file."""

    def __init__(self, path: str, rank: str) -> None:
        self._path = path
        self._rank = rank

    def begin(self) -> None:
        """Start an empty file; one rank does this, before the others write."""
        with open(self._path, "w") as file:
            file.write("[\n")

    def write(self, spans: Iterable[Span]) -> None:
        """Append spans."""
        lines = [
            json.dumps(
                {
                    "name": span.name,
                    "cat": self._rank,
                    "ph": "X",
                    "ts": span.start,
                    "dur": max(0.0, span.stop - span.start),
                    "pid": f"{self._rank} rank",
                    "tid": span.lane,
                    "args": {"step": span.step, "group": span.group},
                }
            )
            for span in spans
        ]
        if lines:
            # One write, so that the lines of the two ranks do not mix.
            with open(self._path, "ab", buffering=0) as file:
                file.write(("".join(f"{line},\n" for line in lines)).encode())


class Timeline:
    """Marks on the stream of the cache rank; does nothing between traced steps.

    A mark ends the span that began at the mark before it.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._file = TraceFile(path, "cache") if path else None
        self._on_gpu = device.type == "cuda"
        self._tracing = False
        self._step = self._group = 0
        self._marks: list[_Mark] = []

    @property
    def is_tracing(self) -> bool:
        """Whether the step under way is traced."""
        return self._tracing

    def enter_step(self, step: int, traced: bool) -> None:
        """Mark what follows as part of a step.

        The first step that is not traced writes the spans of those that were.
        """
        if not traced:
            self.flush()
        self._tracing = traced and self._file is not None
        self._step = step

    def enter_group(self, group: int) -> None:
        """Mark what follows as work on a layer group; what came before is no span."""
        self._group = group
        self.mark("")

    def mark(self, name: str) -> None:
        """End a span, unless it has no name, and begin the next, on the current stream."""
        if not self._tracing:
            return
        when: torch.cuda.Event | float = time.monotonic_ns() / 1e3
        if self._on_gpu:
            when = torch.cuda.Event(enable_timing=True)
            when.record()
        self._marks.append(_Mark(name, self._step, self._group, when))

    def flush(self) -> None:
        """Write the spans of the traced steps; waits for the device to finish them."""
        if self._file is None or not self._marks:
            return
        marks, self._marks = self._marks, []
        times = self._times([mark.when for mark in marks])
        self._file.write(
            Span(mark.name, start, stop, mark.step, mark.group)
            for mark, (start, stop) in zip(marks[1:], pairwise(times), strict=True)
            if mark.name
        )

    def _times(self, marks: list[torch.cuda.Event | float]) -> list[float]:
        if not self._on_gpu:
            return [float(when) for when in marks]  # type: ignore[arg-type]
        torch.cuda.synchronize()
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        host = time.monotonic_ns() / 1e3
        return [host - 1e3 * when.elapsed_time(now) for when in marks]  # type: ignore[union-attr]


class _Mark(NamedTuple):
    name: str
    step: int
    group: int
    when: torch.cuda.Event | float
