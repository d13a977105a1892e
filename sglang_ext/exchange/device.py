"""The exchange between two GPUs: queued on side streams, gated by flags, never waited for.

Right after the forward pass of a step has been queued, this queues, for each layer group, that what
it staged is sent, and that the answer is written into the slots when it has come
(step_transfers.py). So the host never waits, and the next forward pass waits inside its graph only
for what is late.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import deque

import torch
from cache_rank_kernels.gate import triton as gate
from torch import Tensor

from cache_rank.channels.nccl import NcclChannel
from cache_rank.channels.peer import PeerChannel
from cache_rank.config import CacheRankConfig
from cache_rank.measure.timeline import Span
from cache_rank.protocol import AnswerHeader, DownMessage, bulk_shape
from sglang_ext.exchange.base import Exchange, ExchangedRows, WorkingSetRows
from sglang_ext.exchange.gate import DeviceGate, StepTimes
from sglang_ext.exchange.pinned_ring import Field, Inbox, Outbox
from sglang_ext.exchange.transfers import (
    CopiedTransfers,
    GroupMessages,
    NcclTransfers,
    StepParts,
    StepTransfers,
)
from sglang_ext.lifecycle import SparseSequence
from sglang_ext.supervisor import CacheRankDownError, Connection

_SHIPPED = AnswerHeader._fields.index("shipped_tokens")
MAX_SHIPMENTS_UNDER_WAY = 64
"""Each holds a copy of its tokens; when there are more, the forward pass waits for the oldest."""


@dataclasses.dataclass(slots=True)
class _StepUnderWay:
    """What the host looks at once the device is done with a step's answers.

    Attributes:
        step: of this exchange.
        number: that the gate gave it.
        rows: of the step.
        waiting_since: when it was first seen to be computed and not answered.
    """

    step: int
    number: int
    rows: ExchangedRows
    waiting_since: float | None = None


class DeviceExchange(Exchange):
    """Between ranks that have a GPU each."""

    def __init__(
        self,
        connection: Connection,
        config: CacheRankConfig,
        rows: WorkingSetRows,
        gate_of_forward: DeviceGate,
    ) -> None:
        super().__init__(connection, config, rows)
        self._gate = gate_of_forward
        self._down = connection.link.buffers
        rows_at_most = config.max_rows
        # For the scatter stream.
        self._numbers = Outbox(
            self._device,
            step=Field(1, 0),
            first_rows=Field(rows_at_most, -1),
            expected=Field(4 * rows_at_most, -1),
        )
        # Of the rows of each group, and of all: whether they were applied, and how many tokens they
        # brought.
        self._outcome = torch.zeros(
            (2, len(config.groups), rows_at_most), dtype=torch.int64, device=self._device
        )
        self._totals = self._outcome.sum(dim=1)
        self._applied = Inbox(self._totals)
        # What the gate accepts, as of the last answer that came: every program of a scatter reads
        # it, and reads of the host's memory are slow.
        self._accepts = torch.zeros(1, dtype=torch.int32, device=self._device)
        # Guards what the supervisor's thread reads.
        self._lock = threading.Lock()
        self._under_way: deque[_StepUnderWay] = deque()
        self._times: list[StepTimes] = []
        self._traced_steps: set[int] = set()
        self._messages_of: dict[int, list[GroupMessages]] = {}
        self._warm_up()
        self._transfers = self._make_transfers()
        connection.before_abort = gate_of_forward.close
        connection.check = self._check_deadline
        self._gate.open()

    def _warm_up(self) -> None:
        """Run each kernel once, on nothing, so that no request waits for it to compile."""
        config, padding = self._config, torch.zeros(1, dtype=torch.int64, device=self._device)
        sets = self._working_sets
        shipment = torch.empty(
            bulk_shape(config, 1), dtype=config.model.torch_dtype, device=self._device
        )
        self._operations.collect_tokens(sets.keys, sets.values, padding, shipment)
        self._operations.copy_tokens(sets.keys, sets.values, padding, padding)
        self._numbers.write()
        for group in range(len(config.groups)):
            self._apply(group, 1)
        gate.lower_flag(self._gate.computed, 0)
        self._gate.computed.zero_()  # steps of a connection that was lost may have raised them
        torch.cuda.synchronize(self._device)

    def _make_transfers(self) -> StepTransfers:
        parts = StepParts(
            self._gate.computed,
            self._messages,
            self._apply,
            self._config.max_rows,
            # A comparison of checksums stops the device, which no graph can.
            captures=not self._config.checksum,
            timeout=self.connection.timeout,
        )
        up, down = self.connection.link.up, self.connection.link.down
        if isinstance(up, PeerChannel) and isinstance(down, PeerChannel):
            return CopiedTransfers(parts, up, down)
        assert isinstance(up, NcclChannel)
        assert isinstance(down, NcclChannel)
        return NcclTransfers(parts, up, down)

    def begin_step(self, rows: ExchangedRows, traced: bool = False) -> None:
        self._settle()
        super().begin_step(rows, traced)
        self._transfers.times.begin_step(self.counters.steps if traced else None)
        if traced:
            self._traced_steps.add(self.counters.steps)

    def end_step(self) -> None:
        """Queue the exchange of every group, behind the forward pass that has just been queued."""
        rows = self._rows
        if not rows:
            return
        step, number = self.counters.steps, self._gate.step
        self._gate.clock.expect(number, step)
        self._numbers.write(
            step=[number],
            first_rows=[self._working_sets.first_slot(sequence) for sequence in rows.sequences],
            expected=list(itertools.chain.from_iterable(rows.headers(step))),
        )
        self._transfers.queue(len(rows))
        for up_bytes, down_bytes in self._message_sizes(len(rows)):
            self.counters.up_bytes += up_bytes
            self.counters.down_bytes += down_bytes
        with self._lock:
            self._under_way.append(_StepUnderWay(step, number, rows))
        self._gate.end_step()

    def _messages(self, rows: int) -> list[GroupMessages]:
        """What is sent and received of each group, in a step of so many rows."""
        if rows not in self._messages_of:
            self._messages_of[rows] = [
                GroupMessages(staging.view(torch.uint8).view(-1)[:up_bytes], answer[:down_bytes])
                for staging, answer, (up_bytes, down_bytes) in zip(
                    self._gate.staging, self._down, self._message_sizes(rows), strict=True
                )
            ]
        return self._messages_of[rows]

    def _apply(self, group: int, count: int) -> None:
        """Write the answer that has come to so many rows into their slots; see StepParts."""
        layers, numbers = len(self._config.groups[group]), self._numbers
        if group == 0:
            numbers.collect()
        size = DownMessage.size(self._config, layers, count)
        message = DownMessage(self._config, layers, count, self._down[group][:size])
        applied, shipped = self._outcome[:, group, :count]
        gate.refresh(self._accepts, self._gate.accepts)
        self._operations.scatter_step(
            *self._working_sets.groups[group],
            numbers["first_rows"][:count],
            message.header,
            numbers["expected"][: 4 * count].view(count, 4),
            message.slots,
            message.keys,
            message.values,
            applied,
            self._accepts,
        )
        shipped.copy_(message.header[:, _SHIPPED])
        if self._config.checksum and self._rows and int(self._accepts):
            self._compare_checksums(group, self._rows, message)
        gate.signal(self._gate.applied, group, numbers["step"])
        if group + 1 == len(self._config.groups):
            torch.sum(self._outcome, dim=1, out=self._totals)
            self._applied.post(numbers["step"])

    def ship(self, sequence: SparseSequence, pool_rows: Tensor) -> None:
        shipment = self._send_prompt(sequence, pool_rows, MAX_SHIPMENTS_UNDER_WAY)
        with self.connection.link.in_background():
            shipment.record_stream(torch.cuda.current_stream())

    def close(self) -> None:
        self._gate.close()
        # Else the connection keeps this exchange, its graphs and its buffers.
        self.connection.before_abort = self.connection.check = lambda: None
        super().close()
        # What is still queued writes memory that is freed with this exchange. It comes to its end,
        # because `finish` ends every transfer that it waits for.
        self.connection.link.finish()
        self._transfers.scatter_stream.synchronize()
        del self._transfers  # which holds a method of this exchange

    def spans(self) -> list[Span]:
        self._read_clock()
        times, self._times = self._times, []
        spans = self._transfers.times.take_spans()
        offset = self._gate.clock.host_offset()
        for step_times in times:
            spans += self._layer_spans(step_times, offset)
        return spans

    def _layer_spans(self, times: StepTimes, offset: int) -> list[Span]:
        spans = []
        layers = [(stamp + offset) / 1e3 for stamp in times.layers]
        waits = self._gate.clock.waits(times)
        for group, (members, wait) in enumerate(zip(self._config.groups, waits, strict=True)):
            start, stop = layers[members.start], layers[min(members.stop, len(layers) - 1)]
            spans.append(Span("wait", start - 1e6 * wait, start, times.step, group))
            if group + 1 < len(waits):
                stop -= 1e6 * waits[group + 1]
            spans.append(Span("group", start, stop, times.step, group))
            for layer in members[:-1]:
                span = (layers[layer], layers[layer + 1], times.step, group)
                spans.append(Span(f"layer {layer}", *span, lane="layers"))
        return spans

    def _read_clock(self) -> None:
        while (times := self._gate.clock.completed()) is not None:
            self.waited = sum(self._gate.clock.waits(times))
            if times.step in self._traced_steps:
                self._times.append(times)

    def _settle(self) -> None:
        """Account for the steps that the device is done with."""
        self._read_clock()
        newest = self._applied.newest
        while self._under_way and self._under_way[0].number <= newest:
            with self._lock:
                step = self._under_way.popleft()
            applied, shipped = self._applied.letter(step.number)[:, : len(step.rows)].tolist()
            for sequence, times, tokens in zip(step.rows.sequences, applied, shipped, strict=True):
                if times != len(self._config.groups) and not sequence.ended:
                    raise CacheRankDownError(
                        f"the answer to step {step.step} is not for epoch {sequence.epoch}"
                    )
                sequence.statistics.tokens_shipped += tokens
                self.counters.tokens_shipped += tokens

    def _check_deadline(self) -> None:
        """Called by the supervisor's thread.

        Raises:
            CacheRankDownError: an answer is overdue, counted from when the step was computed: long
                prompts may be computed before it.
        """
        with self._lock:
            oldest = self._under_way[0] if self._under_way else None
        if oldest is None or oldest.number <= self._applied.newest:
            return
        if oldest.number > self._gate.clock.newest:
            return  # not computed
        now = time.monotonic()
        if oldest.waiting_since is None:
            oldest.waiting_since = now
        late = now - oldest.waiting_since
        if late > self.connection.timeout:
            raise CacheRankDownError(f"no answer to step {oldest.step} in {late:.1f} s")
