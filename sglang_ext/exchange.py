"""One decode step's exchange with the cache rank, one layer group at a time.

The answer to step t for a layer group is applied just before that group's attention in the next
decode step, so the cache rank has a whole step for each group. Nothing here depends on SGLang.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence

import torch
from cache_rank_kernels.checksum.reference import slots_checksum
from cache_rank_kernels.scatter.reference import scatter_tokens
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.protocol import (
    AnswerHeader,
    DownMessage,
    End,
    Flush,
    Load,
    Row,
    Step,
    UpMessage,
    bulk_shape,
)
from cache_rank.transport import Pending
from sglang_ext.lifecycle import SparseSequence
from sglang_ext.supervisor import CacheRankDownError, Connection

LATE_SECONDS = 1e-3

MAX_SHIPMENTS_UNDER_WAY = 4
"""Each holds a copy of its tokens; the next one waits for the oldest."""


@dataclasses.dataclass(slots=True)
class ExchangeRow:
    """One request in the exchange of a step.

    Attributes:
        batch_index: its row in the batch.
        position: of its current token.
        filled_after: slots in use once the answer to this step is applied.
    """

    sequence: SparseSequence
    batch_index: int
    position: int
    filled_after: int


@dataclasses.dataclass(slots=True)
class ExchangeCounters:
    """Totals since the exchange began."""

    steps: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    bulk_bytes: int = 0
    tokens_shipped: int = 0


@dataclasses.dataclass(slots=True)
class _Answer:
    step: int
    rows: Sequence[ExchangeRow]
    message: DownMessage
    pending: Pending


class Exchange:
    """The inference rank's end of one connection. Dies with the connection.

    Every method raises TransportError, ControlError or CacheRankDownError when the cache rank is
    down.
    """

    def __init__(
        self,
        connection: Connection,
        config: CacheRankConfig,
        key_buffers: Sequence[Tensor],
        value_buffers: Sequence[Tensor],
    ) -> None:
        """Work on the pool buffers of the sparse layers, per layer (pool rows, Hkv, D)."""
        self.connection = connection
        self.counters = ExchangeCounters()
        self.waited = 0.0
        """Seconds that the current step has waited for answers."""
        self._config = config
        self._keys = key_buffers
        self._values = value_buffers
        self._device = key_buffers[0].device
        self._rows: Sequence[ExchangeRow] = ()
        self._batch_index = torch.empty(0, dtype=torch.int64)
        self._last_batch_index: list[int] = []
        self._staged: UpMessage | None = None
        groups = config.groups
        self._up = [self._buffer(UpMessage.size(config, len(g), config.max_rows)) for g in groups]
        self._down = [
            self._buffer(DownMessage.size(config, len(g), config.max_rows)) for g in groups
        ]
        self._sent: list[Pending | None] = [None] * len(groups)
        self._answers: list[_Answer | None] = [None] * len(groups)
        self._shipments: deque[Pending] = deque()

    @property
    def was_late(self) -> bool:
        """Whether the current step waited long enough for answers to count as late."""
        return self.waited > LATE_SECONDS

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def begin_step(self, rows: Sequence[ExchangeRow]) -> None:
        """Announce a step; with no rows, nothing is exchanged and old answers are still applied."""
        self.waited = 0.0
        self._rows = rows
        if not rows:
            return
        self.counters.steps += 1
        batch_index = [row.batch_index for row in rows]
        if batch_index != self._last_batch_index:  # the same in most steps
            self._last_batch_index = batch_index
            self._batch_index = torch.tensor(batch_index, device=self._device)
        announced = [Row(row.sequence.epoch, row.position) for row in rows]
        self.connection.control.send(Step(self.counters.steps, announced))

    def begin_group(self, group: int) -> None:
        """Apply the answer that this group's attention needs, and open its staging buffer."""
        answer, self._answers[group] = self._answers[group], None
        if answer is not None:
            self._apply(group, answer)
        if self._rows:
            if (sent := self._sent[group]) is not None:
                sent.wait(self.connection.timeout)
            layers = len(self._config.groups[group])
            size = UpMessage.size(self._config, layers, len(self._rows))
            self._staged = UpMessage(self._config, layers, len(self._rows), self._up[group][:size])

    def stage(self, layer_in_group: int, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Copy one layer's tensors of the exchanged rows: (batch, heads, D) each."""
        if self._staged is not None:
            index = self._batch_index
            self._staged.queries[:, layer_in_group] = queries[index]
            self._staged.keys[:, layer_in_group] = keys[index]
            self._staged.values[:, layer_in_group] = values[index]

    def end_group(self, group: int) -> None:
        """Send the group's staging buffer, then post the receive of its answer."""
        staged, self._staged = self._staged, None
        if staged is None:
            return
        self._sent[group] = self.connection.link.up.send(staged.buffer)
        layers = len(self._config.groups[group])
        size = DownMessage.size(self._config, layers, len(self._rows))
        message = DownMessage(self._config, layers, len(self._rows), self._down[group][:size])
        # After the send it answers: a receive must never be what a send waits behind.
        pending = self.connection.link.down.receive(message.buffer)
        self._answers[group] = _Answer(self.counters.steps, self._rows, message, pending)
        self.counters.up_bytes += staged.buffer.nbytes
        self.counters.down_bytes += message.buffer.nbytes

    def _apply(self, group: int, answer: _Answer) -> None:
        started = time.perf_counter()
        answer.pending.wait(self.connection.timeout)
        self.waited += time.perf_counter() - started

        first_rows = []
        for row, columns in zip(answer.rows, answer.message.header.tolist(), strict=True):
            header = AnswerHeader(*columns)
            sequence = row.sequence
            if sequence.ended:
                first_rows.append(-1)
                continue
            expected = (answer.step, sequence.epoch, row.position + 1, row.filled_after)
            if header[:4] != expected:
                raise CacheRankDownError(
                    f"answered (step, epoch, resident, filled) {header[:4]}, expected {expected}"
                )
            first_rows.append(sequence.block + self._config.sink_tokens)
            sequence.statistics.tokens_shipped += header.shipped_tokens
            self.counters.tokens_shipped += header.shipped_tokens

        layers = self._config.groups[group]
        message = answer.message
        scatter_tokens(
            self._keys[layers.start : layers.stop],
            self._values[layers.start : layers.stop],
            torch.tensor(first_rows, device=self._device),
            message.slots,
            message.keys,
            message.values,
        )
        if self._config.checksum:
            self._compare_checksums(layers, answer)

    def _compare_checksums(self, layers: range, answer: _Answer) -> None:
        for row, columns in zip(answer.rows, answer.message.header.tolist(), strict=True):
            if row.sequence.ended:
                continue
            first = row.sequence.block + self._config.sink_tokens
            slots = slice(first, first + row.filled_after)
            held = [
                torch.stack(
                    [
                        buffer[slots].transpose(0, 1)
                        for buffer in buffers[layers.start : layers.stop]
                    ]
                )
                for buffers in (self._keys, self._values)
            ]
            if slots_checksum(*held) != AnswerHeader(*columns).checksum:
                raise AssertionError(
                    f"slots of epoch {row.sequence.epoch} at {row.position} differ from the mirror"
                )

    def ship(self, sequence: SparseSequence, pool_rows: Tensor) -> None:
        """Send the next tokens of a prompt, whose pool rows are given, in the background."""
        count = pool_rows.shape[0]
        shipment = torch.stack(
            [
                torch.stack([buffer[pool_rows] for buffer in buffers])
                for buffers in (self._keys, self._values)
            ]
        )
        assert shipment.shape == bulk_shape(self._config, count)
        if len(self._shipments) == MAX_SHIPMENTS_UNDER_WAY:
            self._shipments.popleft().wait(self.connection.timeout)
        self.connection.control.send(Load(sequence.epoch, sequence.shipped, count))
        self._shipments.append(self.connection.link.bulk.send(shipment))
        sequence.shipped += count
        self.counters.bulk_bytes += shipment.nbytes

    def end(self, epochs: list[int]) -> None:
        """Tell the cache rank that epochs are over."""
        self.connection.control.send(End(epochs))

    def close(self) -> None:
        """Drop the channels of a connection that is down."""
        self.connection.control.close()
        self.connection.link.close()

    def flush(self) -> None:
        """Tell the cache rank that all epochs are over."""
        self.connection.control.send(Flush())
