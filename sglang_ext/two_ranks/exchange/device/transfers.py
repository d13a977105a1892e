"""What a step sends and what it does with the answers, queued on streams of their own.

For each message of the schedule

    up stream        when it is computed, sends the staging buffer
    down stream      receives the answer
    scatter stream   when the answer has come, writes it into the slots; by copies it is the
                     down stream

By copies, all that is one chain of calls for sending and one for the answers, the same in every
step of as many requests: each is a graph. NCCL's transfers are queued one by one, with only the
scatters captured; see NcclTransfers for their order.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch

from cache_rank.channels.nccl import NcclChannel
from cache_rank.channels.peer import PeerChannel
from cache_rank.channels.stream_memory import FlagMoves, launch
from cache_rank.channels.transport import Pending
from cache_rank.config import CacheRankConfig
from cache_rank.graphs import capture
from cache_rank.kernels.gate import triton as gate_kernels
from cache_rank.kernels.scatter import scatter_step
from cache_rank.measure.timeline import Span
from cache_rank.messages import MessageBuffers, StepMessages
from cache_rank.protocol import AnswerHeader
from sglang_ext.two_ranks.exchange.connection import Connection
from sglang_ext.two_ranks.exchange.device.gate import DeviceGate
from sglang_ext.two_ranks.exchange.pinned_ring import DeviceToHostRing, Field, HostToDeviceRing
from sglang_ext.two_ranks.exchange.slots import ExchangedRow, SlotBuffers


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

    @contextlib.contextmanager
    def of(
        self,
        name: str,
        group: int,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event | None = None,
    ) -> Iterator[None]:
        """Time what is queued inside on a stream, from when an event has happened."""
        if (step := self._step) is None:
            yield
            return
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
                track=name,
            )
            for name, step, group, start, stop in timed
        ]


_SHIPPED = AnswerHeader._fields.index("shipped_tokens")


class Answer(NamedTuple):
    """An answer of a step: the layer group that it is for, and whether in the step itself."""

    group: int
    same_step: bool


def make_transfers(
    connection: Connection, config: CacheRankConfig, slots: SlotBuffers, gate: DeviceGate
) -> DeviceTransfers:
    """Make the transfers of a connection, by copies or by NCCL as its channels are."""
    if isinstance(connection.link.up, PeerChannel):
        return CopiedTransfers(connection, config, slots, gate)
    return NcclTransfers(connection, config, slots, gate)


class DeviceTransfers(ABC):
    """The transfers of one connection.

    Attributes:
        messages: the memory of messages, which always stays where it is.
        outcomes: per step, (2, requests): in how many groups each request's answer was applied, and
            how many tokens it brought.
        times: when transfers of traced steps began and ended.
        scatter_stream: the stream on which answers are applied.
    """

    scatter_stream: torch.cuda.Stream

    def __init__(
        self, connection: Connection, config: CacheRankConfig, slots: SlotBuffers, gate: DeviceGate
    ) -> None:
        device, groups = slots.device, len(config.groups)
        staging = [message.buffer for message in gate.staging]
        self.messages = MessageBuffers(config, staging, connection.link.buffers)
        self.times = TransferTimes()
        self._config = config
        self._slots = slots
        self._gate = gate
        self._timeout = connection.timeout
        # What the scatter stream reads of a step.
        self._numbers = HostToDeviceRing(
            device,
            step=Field(1, 0),
            first_rows=Field(config.max_rows, -1),
            expected=Field(4 * config.max_rows, -1),
            expected_fresh=Field(4 * config.max_rows, -1),
        )
        self._answers = [
            Answer(message.selects_for, message.same_step)
            for message in config.layer_messages
            if message.selects_for is not None
        ]
        self._by_group = torch.zeros((2, groups, config.max_rows), dtype=torch.int64, device=device)
        self._totals = self._by_group.sum(dim=1)
        self.outcomes = DeviceToHostRing(self._totals)
        # What the gate accepts, as of the last answer that came: every program of a scatter reads
        # it, and reads of the host's memory are slow.
        self._accepts = torch.zeros(1, dtype=torch.int32, device=device)
        flags = gate.computed
        self._waits = [
            FlagMoves(awaited=[flags.data_ptr() + index * flags.itemsize])
            for index in range(flags.numel())
        ]
        self._warm_up()

    def _warm_up(self) -> None:
        """Run each kernel once, on nothing, so that no request waits for it to compile."""
        self._numbers.write()
        for answer in self._answers:
            self._apply(answer, 1)
        gate_kernels.lower_flag(self._gate.computed, 0)
        self._gate.computed.zero_()  # steps of a connection that was lost may have raised them
        torch.cuda.synchronize(self._slots.device)

    def queue(self, step: int, rows: list[ExchangedRow]) -> None:
        """Queue the transfers of a step, whose forward pass has been queued.

        Raises:
            TransportError: a channel is closed. What is to be sent may have been queued, and what
                is to be received not: these transfers are of no use any more.
        """
        self._numbers.write(
            step=[step],
            first_rows=[self._slots.first_slot(row.sequence) for row in rows],
            expected=_expected(rows, step, same_step=False),
            expected_fresh=_expected(rows, step, same_step=True),
        )
        self._queue(len(rows))
        self._gate.awaited_step = step
        if self._config.checksum:
            self._compare_checksums(rows)

    def _compare_checksums(self, rows: list[ExchangedRow]) -> None:
        """Compare what slots hold after a step, when all of it has ended.

        Not after each answer: the host would load kernels and allocate memory, for which CUDA
        may wait for the forward pass, while that waits for the next answer.
        """
        torch.cuda.synchronize(self._slots.device)
        if not self._gate.is_open:
            return
        messages = self.messages.of(len(rows)).down
        for answer in self._answers:
            header = messages[answer.group].header
            self._slots.compare_checksums(answer.group, rows, header, answer.same_step)

    @abstractmethod
    def _queue(self, rows: int) -> None:
        """Queue the transfers of a step of so many requests, whose numbers are written."""

    def _take_computed(self, index: int, stream: torch.cuda.Stream) -> None:
        """Hold a stream, the current one, until a message of its step is computed.

        There is no deadline: every forward pass that is queued comes to its end, with answers or
        without. The flags count forward passes, because nothing holds back forward passes once the
        gate is closed.
        """
        self._waits[index].queue(stream)
        gate_kernels.lower_flag(self._gate.computed, index)

    def _apply(self, answer: Answer, rows: int) -> None:
        """Queue that the answer that has come is written into slots, on the current stream.

        It reads and writes nothing but what stays where it is, so that a graph can hold it.
        """
        group, numbers = answer.group, self._numbers
        message = self.messages.of(rows).down[group]
        expected = numbers["expected_fresh" if answer.same_step else "expected"]
        if answer is self._answers[0]:
            numbers.collect()
        applied, shipped = self._by_group[:, group, :rows]
        gate_kernels.refresh(self._accepts, self._gate.accepts)
        scatter_step(
            *self._slots.groups[group],
            numbers["first_rows"][:rows],
            message.header,
            expected[: 4 * rows].view(rows, 4),
            message.slots,
            message.keys,
            message.values,
            applied,
            self._accepts,
        )
        shipped.copy_(message.header[:, _SHIPPED])
        gate_kernels.signal(self._gate.applied, group, numbers["step"])
        if answer is self._answers[-1]:
            torch.sum(self._by_group, dim=1, out=self._totals)
            self.outcomes.post(numbers["step"])


class CopiedTransfers(DeviceTransfers):
    """Transfers by copies into the peer's memory."""

    def __init__(
        self, connection: Connection, config: CacheRankConfig, slots: SlotBuffers, gate: DeviceGate
    ) -> None:
        super().__init__(connection, config, slots, gate)
        up, down = connection.link.up, connection.link.down
        assert isinstance(up, PeerChannel)
        assert isinstance(down, PeerChannel)
        self.scatter_stream = down.stream  # nothing is received while an answer is applied
        self._up, self._down = up, down
        self._graphs = {
            rows: (
                capture(functools.partial(self._send, rows), up.stream),
                capture(functools.partial(self._take_answers, rows), down.stream),
            )
            for rows in range(1, config.max_rows + 1)
        }

    def _queue(self, rows: int) -> None:
        if self.times.are_taken:
            with torch.cuda.stream(self._up.stream):
                self._send(rows)
            with torch.cuda.stream(self._down.stream):
                self._take_answers(rows)
            return
        send, take_answers = self._graphs[rows]
        with self._up.queueing():
            launch(send, self._up.stream)
        with self._down.queueing():
            launch(take_answers, self._down.stream)

    def _send(self, rows: int) -> None:
        stream = self._up.stream
        for index, message in enumerate(self.messages.of(rows).up):
            self._take_computed(index, stream)
            with self.times.of("send", index, stream):
                self._up.send(message.buffer, buffer_index=index)

    def _take_answers(self, rows: int) -> None:
        stream = self._down.stream
        messages = self.messages.of(rows).down
        for answer in self._answers:
            group = answer.group
            with self.times.of("receive", group, stream):
                self._down.receive(messages[group].buffer, buffer_index=group)
            with self.times.of("scatter", group, stream):
                self._apply(answer, rows)


class NcclTransfers(DeviceTransfers):
    """Transfers by NCCL, whose receives occupy multiprocessors while they wait.

    So a receive begins when the next message is computed, not earlier, unless its answer is needed
    before that. And it is queued only behind the send that it answers, and the cache rank does the
    same: should the driver make a host wait for its device in between, both sides can still go on.
    """

    def __init__(
        self, connection: Connection, config: CacheRankConfig, slots: SlotBuffers, gate: DeviceGate
    ) -> None:
        super().__init__(connection, config, slots, gate)
        up, down = connection.link.up, connection.link.down
        assert isinstance(up, NcclChannel)
        assert isinstance(down, NcclChannel)
        self.scatter_stream = torch.cuda.Stream(up.stream.device, priority=-1)
        self._up, self._down = up, down
        self._graphs = {
            (answer, rows): capture(functools.partial(self._apply, answer, rows))
            for rows in range(1, config.max_rows + 1)
            for answer in self._answers
        }

    def _queue(self, rows: int) -> None:
        received, stream = self._queue_messages(rows), self.scatter_stream
        with torch.cuda.stream(stream):
            for answer, pending in zip(self._answers, received, strict=True):
                pending.wait(self._timeout)
                with self.times.of("scatter", answer.group, stream):
                    self._graphs[answer, rows].replay()

    def _queue_messages(self, rows: int) -> list[Pending]:
        up = self._up
        received: list[Pending] = []
        messages = self.messages.of(rows)
        # An answer with a lead of one group is needed when the next message is computed.
        config = self._config
        behind = 0 if config.forecasts and config.forecast_lead == 1 else 1
        with torch.cuda.stream(up.stream):
            for index, message in enumerate(messages.up):
                self._take_computed(index, up.stream)
                computed = up.stream.record_event()
                with self.times.of("send", index, up.stream, computed):
                    up.send(message.buffer, computed, buffer_index=index)
                answered = self._answers[len(received) : index + 1 - behind]
                received += [self._receive(answer, messages, computed) for answer in answered]
            rest = self._answers[len(received) :]
            received += [self._receive(answer, messages, computed) for answer in rest]
        return received

    def _receive(self, answer: Answer, messages: StepMessages, after: torch.cuda.Event) -> Pending:
        group = answer.group
        with self.times.of("receive", group, self._down.stream, after):
            return self._down.receive(messages.down[group].buffer, after, buffer_index=group)


def _expected(rows: list[ExchangedRow], step: int, same_step: bool) -> list[int]:
    headers = (row.expected_header(step, same_step) for row in rows)
    return list(itertools.chain.from_iterable(headers))
