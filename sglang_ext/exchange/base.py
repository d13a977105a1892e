"""One decode step's exchange with the cache rank, one layer group at a time.

The answer to step t for a layer group is applied just before that group's attention in the next
decode step, so the cache rank has a whole step for each group. Nothing here depends on SGLang.

This file holds what both exchanges share; host_exchange.py holds the one for ranks that are CPU
processes, device_exchange.py the one for GPUs.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch
from cache_rank_kernels.checksum.reference import slots_checksum
from cache_rank_kernels.scatter.reference import LayerBuffers, layer_buffers
from torch import Tensor

from cache_rank.channels.transport import Pending
from cache_rank.config import CacheRankConfig
from cache_rank.measure.timeline import Span
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
    group_sizes,
)
from sglang_ext.lifecycle import SparseSequence
from sglang_ext.supervisor import Connection

LATE_SECONDS = 1e-3


@dataclasses.dataclass(slots=True)
class ExchangedRows:
    """The requests in the exchange of a step.

    Lists and not arrays: of so few numbers a step, each kind of array operation costs the host more
    than all of them.

    Attributes:
        sequences: of each.
        batch_indices: their rows in the batch.
        positions: of their current tokens.
        filled_after: slots in use once the answer to this step is applied.
    """

    sequences: list[SparseSequence] = dataclasses.field(default_factory=list)
    batch_indices: list[int] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)
    filled_after: list[int] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sequences)

    def add(
        self, sequence: SparseSequence, batch_index: int, position: int, filled_after: int
    ) -> None:
        """Add a request."""
        self.sequences.append(sequence)
        self.batch_indices.append(batch_index)
        self.positions.append(position)
        self.filled_after.append(filled_after)

    def of_batch(self, batch: int) -> list[int]:
        """Which of these each row of the batch is, or -1."""
        indices = [-1] * batch
        for row, index in enumerate(self.batch_indices):
            indices[index] = row
        return indices

    def headers(self, step: int) -> list[tuple[int, int, int, int]]:
        """What the header of the answer to a step begins with, of each request."""
        return [
            (step, sequence.epoch, position + 1, filled)
            for sequence, position, filled in zip(
                self.sequences, self.positions, self.filled_after, strict=True
            )
        ]


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
        self._rows = ExchangedRows()
        self._sizes: dict[int, list[tuple[int, int]]] = {}
        self._shipments: deque[Pending] = deque()

    @property
    def was_late(self) -> bool:
        """Whether the step waited long enough for answers to count as late."""
        return self.waited > LATE_SECONDS

    def begin_step(self, rows: ExchangedRows, traced: bool = False) -> None:
        """Announce a step; with no rows, nothing is exchanged and old answers are still applied."""
        self._rows = rows
        if rows:
            self.counters.steps += 1
            epochs = [sequence.epoch for sequence in rows.sequences]
            announced = list(map(Row, epochs, rows.positions))
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

    def _message_sizes(self, rows: int) -> list[tuple[int, int]]:
        """Bytes of the up and the down message of each group, in a step of so many rows."""
        if rows not in self._sizes:
            up, down = (
                group_sizes(message, self._config, rows) for message in (UpMessage, DownMessage)
            )
            self._sizes[rows] = list(zip(up, down, strict=True))
        return self._sizes[rows]

    def _compare_checksums(self, group: int, rows: ExchangedRows, message: DownMessage) -> None:
        """Compare the slots in use with the cache rank's mirror of them; stops the device.

        Raises:
            AssertionError: they differ.
        """
        headers = message.header.tolist()
        for sequence, position, filled, columns in zip(
            rows.sequences, rows.positions, rows.filled_after, headers, strict=True
        ):
            if sequence.ended:
                continue
            if (
                self._working_sets.checksum(group, sequence, filled)
                != AnswerHeader(*columns).checksum
            ):
                raise AssertionError(
                    f"slots of epoch {sequence.epoch} at {position} differ from the mirror"
                )

    def _send_prompt(self, sequence: SparseSequence, pool_rows: Tensor, most: int) -> Tensor:
        """Send tokens of a prompt, behind the oldest of those under way when there are `most`."""
        shipments = self._shipments
        while shipments and (shipments[0].is_done() or len(shipments) == most):
            shipments.popleft().wait(self.connection.timeout)
        shipment = self._collect(sequence, pool_rows)
        shipments.append(self.connection.link.bulk.send(shipment))
        return shipment

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
