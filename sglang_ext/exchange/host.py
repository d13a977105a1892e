"""The exchange between ranks that are CPU processes: the host itself waits, sends and scatters."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cache_rank.channels.transport import Pending
from cache_rank.config import CacheRankConfig
from cache_rank.measure.timeline import Span
from cache_rank.protocol import AnswerHeader, DownMessage, UpMessage, group_sizes
from sglang_ext.exchange.base import Exchange, ExchangedRows, WorkingSetRows
from sglang_ext.lifecycle import SparseSequence
from sglang_ext.supervisor import CacheRankDownError, Connection

MAX_SHIPMENTS_UNDER_WAY = 4
"""Each holds a copy of its tokens; the next one waits for the oldest."""


@dataclasses.dataclass(slots=True)
class _Answer:
    step: int
    rows: ExchangedRows
    message: DownMessage
    pending: Pending


class HostExchange(Exchange):
    """Between ranks that are CPU processes."""

    def __init__(
        self, connection: Connection, config: CacheRankConfig, rows: WorkingSetRows
    ) -> None:
        super().__init__(connection, config, rows)
        self._batch_index = torch.empty(0, dtype=torch.int32)
        self._staged: UpMessage | None = None
        groups = config.groups
        self._up = [
            torch.empty(size, dtype=torch.uint8)
            for size in group_sizes(UpMessage, config, config.max_rows)
        ]
        self._down = connection.link.buffers
        self._sent: list[Pending | None] = [None] * len(groups)
        self._answers: list[_Answer | None] = [None] * len(groups)
        self._traced = False
        self._group_start = 0.0
        self._spans: list[Span] = []

    def begin_step(self, rows: ExchangedRows, traced: bool = False) -> None:
        self.waited = 0.0
        self._traced = traced
        if rows.batch_indices != self._rows.batch_indices:
            batch = max(rows.batch_indices, default=-1) + 1
            self._batch_index = torch.tensor(rows.of_batch(batch), dtype=torch.int32)
        super().begin_step(rows, traced)

    def begin_group(self, group: int) -> None:
        """Apply the answer that this group's attention needs, and open its staging buffer."""
        answer, self._answers[group] = self._answers[group], None
        if answer is not None:
            self._apply(group, answer)
        self._group_start = time.monotonic()
        if self._rows:
            if (sent := self._sent[group]) is not None:
                sent.wait(self.connection.timeout)
            layers = len(self._config.groups[group])
            size, _ = self._message_sizes(len(self._rows))[group]
            self._staged = UpMessage(self._config, layers, len(self._rows), self._up[group][:size])

    def stage(self, layer_in_group: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Copy one layer's tensors of the exchanged rows: (batch, heads, D) each."""
        if self._staged is not None:
            count = self._batch_index.shape[0]
            self._operations.pack_layer(
                self._staged.tokens,
                self._batch_index,
                layer_in_group,
                queries[:count],
                keys[:count],
                values[:count],
            )

    def end_group(self, group: int) -> None:
        """Send the group's staging buffer, then post the receive of its answer."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        self._trace("group", group, self._group_start)
        self._sent[group] = self.connection.link.up.send(staged.buffer, lane=group)
        layers = len(self._config.groups[group])
        _, size = self._message_sizes(len(self._rows))[group]
        message = DownMessage(self._config, layers, len(self._rows), self._down[group][:size])
        # After the send it answers: a receive must never be what a send waits behind.
        pending = self.connection.link.down.receive(message.buffer, lane=group)
        self._answers[group] = _Answer(self.counters.steps, self._rows, message, pending)
        self.counters.up_bytes += staged.buffer.nbytes
        self.counters.down_bytes += message.buffer.nbytes

    def end_step(self) -> None:
        """Nothing is left to do: each group was sent when it was computed."""

    def spans(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans

    def _trace(self, name: str, group: int, start: float) -> None:
        if self._traced:
            stop = time.monotonic()
            self._spans.append(Span(name, 1e6 * start, 1e6 * stop, self.counters.steps, group))

    def ship(self, sequence: SparseSequence, pool_rows: Tensor) -> None:
        self._send_prompt(sequence, pool_rows, MAX_SHIPMENTS_UNDER_WAY)

    def _apply(self, group: int, answer: _Answer) -> None:
        started = time.monotonic()
        answer.pending.wait(self.connection.timeout)
        self.waited += time.monotonic() - started
        self._trace("wait", group, started)

        started = time.monotonic()
        message, rows, working_sets = answer.message, answer.rows, self._working_sets
        first_rows, expected = [], rows.headers(answer.step)
        for sequence, columns, wanted in zip(
            rows.sequences, message.header.tolist(), expected, strict=True
        ):
            header = AnswerHeader(*columns)
            if sequence.ended:
                first_rows.append(-1)
                continue
            if header[:4] != wanted:
                raise CacheRankDownError(
                    f"answered (step, epoch, resident, filled) {header[:4]}, expected {wanted}"
                )
            first_rows.append(working_sets.first_slot(sequence))
            sequence.statistics.tokens_shipped += header.shipped_tokens
            self.counters.tokens_shipped += header.shipped_tokens
        self._operations.scatter_step(
            *working_sets.groups[group],
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
            self._compare_checksums(group, rows, message)


class HostGate:
    """In place of a DeviceGate on a CPU, where the exchange happens in the forward pass itself."""

    def __init__(self, attempt: Callable[[Callable[[Any], None]], None]) -> None:
        """Act through `attempt`, which does something with the HostExchange while it is up."""
        self._attempt = attempt

    def plan_step(self, exchanges: bool) -> tuple[int, int]:
        """Steps need no numbers here."""
        return 0, 0

    def begin_forward(self) -> None:
        """Nothing to time."""

    def begin_group(self, group: int) -> None:
        """Before a group's first layer: its slots hold the selection for this step."""
        self._attempt(lambda exchange: exchange.begin_group(group))

    def stage(self, group: int, layer_in_group: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep one layer's tensors for the cache rank: (batch, heads, D) each."""
        self._attempt(lambda exchange: exchange.stage(layer_in_group, q, k, v))

    def end_group(self, group: int) -> None:
        """After a group's last layer: what the cache rank needs is on its way."""
        self._attempt(lambda exchange: exchange.end_group(group))
