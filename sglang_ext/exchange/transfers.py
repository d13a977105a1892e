"""What a step sends and what it does with the answers, queued on streams of their own.

For each layer group

    up stream        when the group is computed, send its staging buffer
    down stream      receive the answer
    scatter stream   when the answer has come, apply it

By copies, all that is one chain of calls for sending and one for the answers, the same in every
step of as many rows: each is a graph. NCCL's transfers are queued one by one, with only `apply`
captured; see NcclTransfers for their order.
"""

from __future__ import annotations

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from cache_rank_kernels.gate import triton as gate
from torch import Tensor

from cache_rank.channels.nccl import NcclChannel
from cache_rank.channels.peer import PeerChannel
from cache_rank.channels.stream_memory import FlagMoves, launch
from cache_rank.channels.transport import Pending
from cache_rank.graphs import capture
from cache_rank.measure.timeline import Span

_UNTIMED = contextlib.nullcontext()


class GroupMessages(NamedTuple):
    """What is sent and received of a layer group, (bytes,) uint8 each."""

    staged: Tensor
    answer: Tensor


class StepParts(NamedTuple):
    """What the transfers of a step are made of.

    Attributes:
        computed: (groups,) int64 flags, raised by forward passes when a group is staged: they
            count, because nothing holds back forward passes once the gate is closed.
        messages: of each group, for so many rows; always the same memory.
        apply: queues what is done with the answer of a group to so many rows, on the current
            stream. It reads and writes nothing but what stays where it is.
        rows_at_most: of a step.
        captures: whether a graph can hold `apply`.
        timeout: seconds.
    """

    computed: Tensor
    messages: Callable[[int], list[GroupMessages]]
    apply: Callable[[int, int], None]
    rows_at_most: int
    captures: bool
    timeout: float


class TransferTimes:
    """When what was queued on streams began and ended, of steps that are traced."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._timed: list[tuple[str, int, int, torch.cuda.Event, torch.cuda.Event]] = []

    def begin_step(self, step: int | None) -> None:
        """Begin a step that is traced, or one that is not."""
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
        """The times so far; waits for the device."""
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


class StepTransfers(ABC):
    """Queues the transfers of steps.

    Attributes:
        scatter_stream: on which answers are applied.
        times: of traced steps.
    """

    scatter_stream: torch.cuda.Stream

    def __init__(self, parts: StepParts) -> None:
        self.times = TransferTimes()
        self._parts = parts
        flags = parts.computed
        self._waits = [
            FlagMoves(awaited=[flags.data_ptr() + group * flags.itemsize])
            for group in range(flags.shape[0])
        ]

    def _take_computed(self, group: int, stream: torch.cuda.Stream) -> None:
        """Hold a stream, the current one, until a group of its step is computed.

        There is no deadline: every forward pass that is queued comes to its end, with answers or
        without.
        """
        self._waits[group].queue(stream)
        gate.lower_flag(self._parts.computed, group)

    @abstractmethod
    def queue(self, rows: int) -> None:
        """Queue the transfers of a step of so many rows, whose forward pass has been queued.

        Raises:
            TransportError: a channel is closed. What is to be sent may have been queued, and what
                is to be received not: this is of no use any more.
        """


class CopiedTransfers(StepTransfers):
    """Transfers by copies into the peer's memory."""

    def __init__(self, parts: StepParts, up: PeerChannel, down: PeerChannel) -> None:
        super().__init__(parts)
        self.scatter_stream = down.stream  # nothing is received while an answer is applied
        self._up, self._down = up, down
        self._graphs = {
            rows: (
                capture(functools.partial(self._send, rows), up.stream),
                capture(functools.partial(self._take_answers, rows), down.stream),
            )
            for rows in (range(1, parts.rows_at_most + 1) if parts.captures else ())
        }

    def queue(self, rows: int) -> None:
        send, take_answers = self._graphs.get(rows, (None, None))
        if send is None or take_answers is None or self.times.are_taken:
            with torch.cuda.stream(self._up.stream):
                self._send(rows)
            with torch.cuda.stream(self._down.stream):
                self._take_answers(rows)
            return
        with self._up.queueing():
            launch(send, self._up.stream)
        with self._down.queueing():
            launch(take_answers, self._down.stream)

    def _send(self, rows: int) -> None:
        stream = self._up.stream
        for group, messages in enumerate(self._parts.messages(rows)):
            self._take_computed(group, stream)
            with self.times.of("send", group, stream):
                self._up.send(messages.staged, lane=group)

    def _take_answers(self, rows: int) -> None:
        stream = self._down.stream
        for group, messages in enumerate(self._parts.messages(rows)):
            with self.times.of("receive", group, stream):
                self._down.receive(messages.answer, lane=group)
            with self.times.of("scatter", group, stream):
                self._parts.apply(group, rows)


class NcclTransfers(StepTransfers):
    """Transfers by NCCL, whose receives occupy multiprocessors while they wait.

    So a receive begins when the next group is computed, not earlier. And it is queued only behind
    the send that it answers, and the cache rank does the same: should the driver make a host wait
    for its device in between, both sides can still go on.
    """

    def __init__(self, parts: StepParts, up: NcclChannel, down: NcclChannel) -> None:
        super().__init__(parts)
        self.scatter_stream = torch.cuda.Stream(up.stream.device, priority=-1)
        self._up, self._down = up, down
        self._graphs = {
            (group, rows): capture(functools.partial(parts.apply, group, rows))
            for rows in (range(1, parts.rows_at_most + 1) if parts.captures else ())
            for group in range(parts.computed.shape[0])
        }

    def queue(self, rows: int) -> None:
        received, stream = self._queue_messages(rows), self.scatter_stream
        with torch.cuda.stream(stream):
            for group, pending in enumerate(received):
                pending.wait(self._parts.timeout)
                with self.times.of("scatter", group, stream):
                    if self._graphs:
                        self._graphs[group, rows].replay()
                    else:
                        self._parts.apply(group, rows)

    def _queue_messages(self, rows: int) -> list[Pending]:
        up, received = self._up, []
        messages = self._parts.messages(rows)
        with torch.cuda.stream(up.stream):
            for group, (staged, _) in enumerate(messages):
                self._take_computed(group, up.stream)
                computed = up.stream.record_event()
                with self.times.of("send", group, up.stream, computed):
                    up.send(staged, computed, lane=group)
                if group:
                    received.append(self._receive(group - 1, messages[group - 1], computed))
            received.append(self._receive(len(messages) - 1, messages[-1], computed))
        return received

    def _receive(self, group: int, messages: GroupMessages, after: torch.cuda.Event) -> Pending:
        with self.times.of("receive", group, self._down.stream, after):
            return self._down.receive(messages.answer, after, lane=group)
