"""One decode step's exchange with the cache rank, one layer group at a time.

The answer to step t for a layer group is applied just before that group's attention in the next
decode step, so the cache rank has a whole step for each group. Nothing here depends on SGLang.

This file holds what both exchanges share, and the one for ranks that are CPU processes, in which
the host itself waits, sends and scatters; device_exchange.py holds the one for GPUs.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cache_rank_kernels.checksum.reference import slots_checksum
from cache_rank_kernels.scatter.reference import LayerBuffers, layer_buffers
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.operations import operations_for
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
from cache_rank.timeline import Span
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


class WorkingSetRows:
    """The pool's K and V buffers of the sparse layers, and where slots are in them.

    Attributes:
        keys, values: all sparse layers.
        groups: keys and values of each layer group.
    """

    def __init__(
        self, config: CacheRankConfig, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        """Describe buffers, per layer (pool rows, Hkv, D)."""
        self.keys, self.values = layer_buffers(keys), layer_buffers(values)
        self.groups: list[tuple[LayerBuffers, LayerBuffers]] = [
            (
                layer_buffers(keys[layers.start : layers.stop]),
                layer_buffers(values[layers.start : layers.stop]),
            )
            for layers in config.groups
        ]
        self._sinks = config.sink_tokens

    def first_slot(self, sequence: SparseSequence) -> int:
        """The pool row of a sequence's slot 0."""
        return sequence.block + self._sinks

    def checksum(self, group: int, sequence: SparseSequence, filled: int) -> int:
        """Checksum of the slots in use; stops the device."""
        first = self.first_slot(sequence)
        held = [
            torch.stack([tensor[first : first + filled].transpose(0, 1) for tensor in part.tensors])
            for part in self.groups[group]
        ]
        return slots_checksum(*held)


class Exchange(ABC):
    """The inference rank's end of one connection. Dies with the connection.

    Every method raises TransportError, ControlError or CacheRankDownError when the cache rank is
    down.

    Attributes:
        connection: to the cache rank.
        counters: totals.
        waited: seconds that a step waited for answers: the current step, or on a GPU the last one
            whose times are known.
    """

    def __init__(
        self, connection: Connection, config: CacheRankConfig, rows: WorkingSetRows
    ) -> None:
        self.connection = connection
        self.counters = ExchangeCounters()
        self.waited = 0.0
        self._config = config
        self._working_sets = rows
        self._device = rows.keys.tensors[0].device
        self._operations = operations_for(self._device)
        self._rows: Sequence[ExchangeRow] = ()

    @property
    def was_late(self) -> bool:
        """Whether the step waited long enough for answers to count as late."""
        return self.waited > LATE_SECONDS

    def begin_step(self, rows: Sequence[ExchangeRow], traced: bool = False) -> None:
        """Announce a step; with no rows, nothing is exchanged and old answers are still applied."""
        self._rows = rows
        if rows:
            self.counters.steps += 1
            announced = [Row(row.sequence.epoch, row.position) for row in rows]
            self.connection.control.send(Step(self.counters.steps, announced, traced))

    @abstractmethod
    def end_step(self) -> None:
        """The forward pass of the step has been computed, or on a GPU been queued."""

    @abstractmethod
    def spans(self) -> list[Span]:
        """What happened in the traced steps so far; on a GPU, waits for it."""

    @abstractmethod
    def ship(self, sequence: SparseSequence, pool_rows: Tensor) -> None:
        """Send the next tokens of a prompt, whose pool rows are given, in the background."""

    def end(self, epochs: list[int]) -> None:
        """Tell the cache rank that epochs are over."""
        self.connection.control.send(End(epochs))

    def flush(self) -> None:
        """Tell the cache rank that all epochs are over."""
        self.connection.control.send(Flush())

    def close(self) -> None:
        """Drop the channels of a connection that is down."""
        self.connection.control.close()
        self.connection.link.close()

    def _message_sizes(self, group: int) -> tuple[int, int]:
        """Bytes of the up and the down message of the current step."""
        layers, rows = len(self._config.groups[group]), len(self._rows)
        return (
            UpMessage.size(self._config, layers, rows),
            DownMessage.size(self._config, layers, rows),
        )

    def _expected(self, row: ExchangeRow, step: int) -> tuple[int, int, int, int]:
        """The first columns that the header of a row's answer must have."""
        return step, row.sequence.epoch, row.position + 1, row.filled_after

    def _collect(self, sequence: SparseSequence, pool_rows: Tensor) -> Tensor:
        """Copy a prompt's tokens out of the pool, and announce them."""
        count = pool_rows.shape[0]
        shipment = torch.empty(
            bulk_shape(self._config, count),
            dtype=self._config.model.torch_dtype,
            device=self._device,
        )
        self._operations.collect_tokens(
            self._working_sets.keys, self._working_sets.values, pool_rows, shipment
        )
        self.connection.control.send(Load(sequence.epoch, sequence.shipped, count))
        sequence.shipped += count
        self.counters.bulk_bytes += shipment.nbytes
        return shipment


@dataclasses.dataclass(slots=True)
class _Answer:
    step: int
    rows: Sequence[ExchangeRow]
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
        self._up = [_buffer(UpMessage.size(config, len(g), config.max_rows)) for g in groups]
        self._down = [_buffer(DownMessage.size(config, len(g), config.max_rows)) for g in groups]
        self._sent: list[Pending | None] = [None] * len(groups)
        self._answers: list[_Answer | None] = [None] * len(groups)
        self._shipments: deque[Pending] = deque()
        self._traced = False
        self._group_start = 0.0
        self._spans: list[Span] = []

    def begin_step(self, rows: Sequence[ExchangeRow], traced: bool = False) -> None:
        self.waited = 0.0
        self._traced = traced
        super().begin_step(rows, traced)
        exchanged = [-1] * (max((row.batch_index for row in rows), default=-1) + 1)
        for index, row in enumerate(rows):
            exchanged[row.batch_index] = index
        self._batch_index = torch.tensor(exchanged, dtype=torch.int32)

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
            size, _ = self._message_sizes(group)
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
        self._sent[group] = self.connection.link.up.send(staged.buffer)
        layers = len(self._config.groups[group])
        _, size = self._message_sizes(group)
        message = DownMessage(self._config, layers, len(self._rows), self._down[group][:size])
        # After the send it answers: a receive must never be what a send waits behind.
        pending = self.connection.link.down.receive(message.buffer)
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
        if len(self._shipments) == MAX_SHIPMENTS_UNDER_WAY:
            self._shipments.popleft().wait(self.connection.timeout)
        shipment = self._collect(sequence, pool_rows)
        self._shipments.append(self.connection.link.bulk.send(shipment))

    def _apply(self, group: int, answer: _Answer) -> None:
        started = time.monotonic()
        answer.pending.wait(self.connection.timeout)
        self.waited += time.monotonic() - started
        self._trace("wait", group, started)

        started = time.monotonic()
        message, rows, working_sets = answer.message, answer.rows, self._working_sets
        first_rows, expected = [], []
        for row, columns in zip(rows, message.header.tolist(), strict=True):
            header = AnswerHeader(*columns)
            expected.append(self._expected(row, answer.step))
            if row.sequence.ended:
                first_rows.append(-1)
                continue
            if header[:4] != expected[-1]:
                raise CacheRankDownError(
                    f"answered (step, epoch, resident, filled) {header[:4]}, "
                    f"expected {expected[-1]}"
                )
            first_rows.append(working_sets.first_slot(row.sequence))
            row.sequence.statistics.tokens_shipped += header.shipped_tokens
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
            for row, columns in zip(rows, message.header.tolist(), strict=True):
                if not row.sequence.ended:
                    held = working_sets.checksum(group, row.sequence, row.filled_after)
                    check_slots(row, held, AnswerHeader(*columns).checksum)


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


def check_slots(row: ExchangeRow, held: int, mirror: int) -> None:
    """Compare the checksums of slots and mirror.

    Raises:
        AssertionError: they differ.
    """
    if held != mirror:
        raise AssertionError(
            f"slots of epoch {row.sequence.epoch} at {row.position} differ from the mirror"
        )


def _buffer(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)
