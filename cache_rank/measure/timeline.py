"""What a rank did when, as a trace that Perfetto and Chrome read.

Both ranks append to one file, in the JSON array format, whose closing bracket may be missing. Times
are microseconds of the host's monotonic clock, which the ranks share; device times are translated
by reading both clocks once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from cache_rank.kernels.pack import stamp
from cache_rank.schedule import LayerMessage

Part = Literal["begin", "receive", "append", "predict", "score", "select", "gather"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What is done for a message, in this order; not every message has all parts. `begin` is no part,
but when the wait for the message begins."""


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        name: what took it.
        start, stop: microseconds of the host's monotonic clock.
        step, group: the step and the layer group that it belongs to.
        track: the row of the rank's display; spans of one track do not overlap.
    """

    name: str
    start: float
    stop: float
    step: int
    group: int
    track: str = "compute"


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
        lines = [
            json.dumps(
                {
                    "name": span.name,
                    "cat": self._rank,
                    "ph": "X",
                    "ts": span.start,
                    "dur": max(0.0, span.stop - span.start),
                    "pid": f"{self._rank} rank",
                    "tid": span.track,
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
    """When the parts of a step were done, on the stream of the cache rank; nothing without a file.

    A mark is one kernel that stores the time. CUDA graphs hold it between the kernels that it
    times, so that what is traced is what is served. Every step leaves its marks where the step
    before left them; those of traced steps are copied.
    """

    def __init__(
        self, path: str, device: torch.device, layer_messages: Sequence[LayerMessage]
    ) -> None:
        """Append to a file, if there is one, when the parts of each message end."""
        self._file = TraceFile(path, "cache") if path else None
        self._index = {message: index for index, message in enumerate(layer_messages)}
        self._stamps = torch.zeros(
            (len(layer_messages), len(PARTS)), dtype=torch.int64, device=device
        )
        self._traced_step: int | None = None
        self._traced: list[tuple[int, Tensor]] = []

    def enter_step(self, step: int, traced: bool) -> None:
        """Begin a step. The first step that is not traced writes the spans of those that were."""
        if self._traced_step is not None:
            self._traced.append((self._traced_step, self._stamps.clone()))
        self._traced_step = step if traced and self._file is not None else None
        if not traced:
            self.flush()

    def mark(self, layer_message: LayerMessage, part: Part) -> None:
        """Mark, on the current stream, that a part of what is done for a message has ended."""
        if self._file is not None:
            stamp(self._stamps, self._index[layer_message] * len(PARTS) + PARTS.index(part))

    def flush(self) -> None:
        """Write the spans of the traced steps; waits for the device to finish them."""
        if self._file is None or not self._traced:
            return
        traced, self._traced = self._traced, []
        offset = host_offset(self._stamps.device)
        for step, stamps in traced:
            for index, times in enumerate(stamps.tolist()):
                marks = [
                    (part, (nanoseconds + offset) / 1e3)
                    for part, nanoseconds in zip(PARTS, times, strict=True)
                    if nanoseconds
                ]
                self._file.write(
                    Span(part, start, stop, step, index)
                    for (_, start), (part, stop) in pairwise(marks)
                )


def host_offset(device: torch.device) -> int:
    """The nanoseconds from a stamp to the host's monotonic clock; stops the device."""
    if device.type != "cuda":
        return 0
    now = torch.zeros(1, dtype=torch.int64, device=device)
    stamp(now, 0)
    torch.cuda.current_stream().synchronize()
    return time.monotonic_ns() - int(now)
