"""The exchange between ranks that are CPU processes: the host itself waits, sends and scatters.

Transfers happen inside the forward pass, group by group. This path serves tests and development.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cache_rank.channels.control import ControlError
from cache_rank.channels.transport import Pending, TransportError
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.pack import pack_hidden, pack_layer
from cache_rank.kernels.scatter import scatter_step
from cache_rank.measure.timeline import Span
from cache_rank.messages import MessageBuffers
from cache_rank.protocol import AnswerHeader, DownMessage, up_sizes
from cache_rank.schedule import index_by_hidden, index_by_kv
from sglang_ext.two_ranks.exchange.base import Exchange, ExchangeCounters, Gate
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError, Connection
from sglang_ext.two_ranks.exchange.slots import ExchangedRow, SlotBuffers, by_batch_row
from sglang_ext.two_ranks.lifecycle import SparseSequence


class HostGate(Gate):
    """Carries out the exchange that is open, group by group.

    A cache rank that is lost in a forward pass closes the gate. The pass goes on with its last
    selection, as between GPUs.

    Attributes:
        exchange: None while there is no connection.
    """

    def __init__(self) -> None:
        self.exchange: HostExchange | None = None

    def begin_forward(self) -> None:
        """Nothing is to be timed here."""

    def stage_hidden(self, group: int, hidden: Tensor, residual: Tensor | None) -> None:
        self._while_open(lambda exchange: exchange.stage_hidden(group, hidden, residual))

    def enter_group(self, group: int) -> None:
        self._while_open(lambda exchange: exchange.take_answer(group))

    def stage(
        self, group: int, layer_in_group: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        self._while_open(
            lambda exchange: exchange.stage(group, layer_in_group, queries, keys, values)
        )

    def leave_group(self, group: int) -> None:
        self._while_open(lambda exchange: exchange.leave(group))

    def _while_open(self, action: Callable[[HostExchange], None]) -> None:
        if (exchange := self.exchange) is None:
            return
        try:
            action(exchange)
        except (TransportError, ControlError, CacheRankDownError) as error:
            exchange.failure, self.exchange = error, None


@dataclasses.dataclass(slots=True)
class _AnswerUnderWay:
    step: int
    rows: list[ExchangedRow]
    message: DownMessage
    same_step: bool
    pending: Pending


class HostExchange(Exchange):
    """The exchange between ranks that are CPU processes; forward passes carry it out.

    Attributes:
        failure: what closed the gate in a forward pass, or None.
    """

    def __init__(
        self,
        connection: Connection,
        config: CacheRankConfig,
        slots: SlotBuffers,
        counters: ExchangeCounters,
        gate: HostGate,
        chunk_tokens: int,
        coded_tokens: int,
    ) -> None:
        super().__init__(connection, config, slots, counters, chunk_tokens, coded_tokens)
        staging = [
            torch.empty(size, dtype=torch.uint8) for size in up_sizes(config, config.max_rows)
        ]
        self.failure: Exception | None = None
        self._messages = MessageBuffers(config, staging, connection.link.buffers)
        self._step, self._traced = 0, False
        self._rows: list[ExchangedRow] = []
        self._is_complete = True
        self._batch_index = torch.empty(0, dtype=torch.int32)
        self._layer_messages = config.layer_messages
        self._index_by_kv = index_by_kv(self._layer_messages)
        self._index_by_hidden = index_by_hidden(self._layer_messages)
        self._sent: list[Pending | None] = [None] * len(self._layer_messages)
        self._answers: list[_AnswerUnderWay | None] = [None] * len(config.groups)
        self._group_start = 0.0
        self._spans: list[Span] = []
        self._gate = gate
        gate.exchange = self

    def announce(self, step: int, rows: list[ExchangedRow], traced: bool = False) -> None:
        self._step, self._rows, self._traced = step, rows, traced
        self._is_complete = False
        self.waited = 0.0
        batch = 1 + max((row.batch_index for row in rows), default=-1)
        self._batch_index = torch.tensor(by_batch_row(rows, batch), dtype=torch.int32)
        super().announce(step, rows, traced)

    def finish_step(self) -> None:
        """Account for what the forward pass has sent and received.

        Raises:
            TransportError, ControlError, CacheRankDownError: the cache rank was lost in it.
        """
        if self.failure is not None:
            raise self.failure
        self._is_complete = True
        if self._rows:
            self._count_messages(self._messages.nbytes(len(self._rows)))

    @property
    def is_lost(self) -> bool:
        return self._gate.exchange is not self

    def stale_requests(
        self, step: int, sequences: Sequence[SparseSequence]
    ) -> list[SparseSequence]:
        if step != self._step or self._is_complete:
            return []
        exchanged = [row.sequence for row in self._rows]
        return [sequence for sequence in sequences if sequence in exchanged]

    def spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        self._gate.exchange = None
        self.failure = None  # its traceback holds the buffers of this connection
        super().close()

    # In the forward pass.

    def take_answer(self, group: int) -> None:
        """Write the answer that the group's attention needs into its slots, if there is one.

        Raises:
            TransportError: it did not come in time.
            CacheRankDownError: it is not the one that was expected.
        """
        answer, self._answers[group] = self._answers[group], None
        if answer is not None:
            self._wait_for(group, answer)
            self._apply(group, answer)
        self._group_start = time.monotonic()

    def stage(
        self, group: int, layer_in_group: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Copy one layer's tensors of the exchanged requests: (batch, heads, D) each."""
        if not self._rows:
            return
        index, count = self._index_by_kv[group], self._batch_index.shape[0]
        if layer_in_group == 0:
            self._wait_until_sent(index)
        pack_layer(
            self._messages.of(len(self._rows)).up[index].tokens,
            self._batch_index,
            layer_in_group,
            queries[:count],
            keys[:count],
            values[:count],
        )

    def stage_hidden(self, group: int, hidden: Tensor, residual: Tensor | None) -> None:
        """Copy what enters a group, (batch, H) each, and send it with what the last group left."""
        if not self._rows:
            return
        index, count = self._index_by_hidden[group], self._batch_index.shape[0]
        if self._layer_messages[index].kv_of is None:
            self._wait_until_sent(index)
        pack_hidden(
            self._messages.of(len(self._rows)).up[index].hidden,
            self._batch_index,
            hidden[:count],
            None if residual is None else residual[:count],
        )
        self._send(index)

    def leave(self, group: int) -> None:
        """Send what is staged of a group, unless it goes with the hidden state to come."""
        if not self._rows:
            return
        self._trace("group", group, self._group_start)
        index = self._index_by_kv[group]
        if self._layer_messages[index].hidden_of is None:
            self._send(index)

    def _send(self, index: int) -> None:
        """Send a message as it is staged, then post the receive of its answer."""
        messages, layer_message = self._messages.of(len(self._rows)), self._layer_messages[index]
        link = self.connection.link
        self._sent[index] = link.up.send(messages.up[index].buffer, buffer_index=index)
        # A receive must never be what a send waits behind, so it is posted after the send.
        if (group := layer_message.selects_for) is not None:
            down = messages.down[group]
            pending = link.down.receive(down.buffer, buffer_index=group)
            self._answers[group] = _AnswerUnderWay(
                self._step, self._rows, down, layer_message.same_step, pending
            )

    def _wait_until_sent(self, index: int) -> None:
        """Wait until a staging buffer may be written again."""
        if (sent := self._sent[index]) is not None:
            sent.wait(self.connection.timeout)

    def _wait_for(self, group: int, answer: _AnswerUnderWay) -> None:
        started = time.monotonic()
        answer.pending.wait(self.connection.timeout)
        self.waited += time.monotonic() - started
        self._trace("wait", group, started)

    def _apply(self, group: int, answer: _AnswerUnderWay) -> None:
        started = time.monotonic()
        message, rows, slots = answer.message, answer.rows, self._slots
        expected = [row.expected_header(answer.step, answer.same_step) for row in rows]
        first_rows = []
        for row, columns, wanted in zip(rows, message.header.tolist(), expected, strict=True):
            sequence, header = row.sequence, AnswerHeader(*columns)
            if sequence.ended:
                first_rows.append(-1)
                continue
            if header[:4] != wanted:
                raise CacheRankDownError(
                    f"answered (step, sequence, resident, filled) {header[:4]}, expected {wanted}"
                )
            first_rows.append(slots.first_slot(sequence))
            self._count_tokens(sequence, header.shipped_tokens)
        scatter_step(
            *slots.groups[group],
            torch.tensor(first_rows, dtype=torch.int32),
            message.header,
            torch.tensor(expected),
            message.slots,
            message.keys,
            message.values,
            torch.empty(len(rows), dtype=torch.int32),
        )
        self._trace("scatter", group, started)
        if self._config.checksum:
            slots.compare_checksums(group, rows, message.header, answer.same_step)

    def _trace(self, name: str, group: int, start: float) -> None:
        if self._traced:
            stop = time.monotonic()
            self._spans.append(Span(name, 1e6 * start, 1e6 * stop, self._step, group))
