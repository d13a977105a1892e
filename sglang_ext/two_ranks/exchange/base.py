"""What the exchanges between CPUs and between GPUs have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import torch
from torch import Tensor

from cache_rank import residency
from cache_rank.channels.transport import Pending
from cache_rank.config import CacheRankConfig
from cache_rank.kernels.scatter import collect_tokens, put_tokens
from cache_rank.measure.timeline import Span
from cache_rank.pages import PAGE_TOKENS
from cache_rank.protocol import (
    Adopt,
    Attend,
    AttendedMessage,
    KeyBasis,
    Load,
    LoadTogether,
    QueryProjection,
    Restore,
    Row,
    Step,
    bulk_shape,
)
from cache_rank.residency.base import Residency
from cache_rank.residency.encoding import PageEncoder
from sglang_ext.memory import SHIPPED_TOKENS
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError, Connection
from sglang_ext.two_ranks.exchange.slots import ExchangedRow, SlotBuffers
from sglang_ext.two_ranks.lifecycle import SparseSequence

_LEAST_WAIT_SECONDS = 1e-3
"""What has come by a deadline is taken."""

_PAGES_UNDER_WAY = 16
"""As many pages come back before the host waits for them."""

_ALIGNMENT = 256
"""Each shipment begins at a multiple of so many bytes."""

_PADDING_ROW = 0
"""The row of SGLang's pool that it writes to what nobody reads."""

LATE_SECONDS = 1e-3
"""A step that waited longer than this for answers counts as late."""


class Gate(ABC):
    """Where the forward pass meets the exchange: one in a process, while connections come and go.

    A forward pass calls `begin_forward`, and then for each layer group `stage_hidden`, if queries
    are forecast, `enter_group`, `stage` for each of its layers, and `leave_group`.

    Attributes:
        awaited_step: the last step that was exchanged, for whose answers the next forward pass
            waits in groups that are answered a step ahead; 0 is none.
    """

    awaited_step = 0

    @abstractmethod
    def begin_forward(self) -> None:
        """Begin the forward pass of a decode step."""

    @abstractmethod
    def stage_hidden(self, group: int, hidden: Tensor, residual: Tensor | None) -> None:
        """Let the hidden state that enters a group go, with what the group before it left.

        Args:
            hidden: (batch, H).
            residual: (batch, H), which is added; None is zero.
        """

    @abstractmethod
    def enter_group(self, group: int) -> None:
        """Let the group's layers wait until their slots hold the selection for this step."""

    @abstractmethod
    def stage(
        self, group: int, layer_in_group: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Keep one layer's tensors of the exchanged requests for the cache rank.

        Args:
            queries, keys, values: (batch, heads, D) each.
        """

    @abstractmethod
    def leave_group(self, group: int) -> None:
        """The group's last attention is done.

        What the cache rank needs of it goes, unless it goes with the next hidden state.
        """


@dataclasses.dataclass(slots=True)
class ExchangeCounters:
    """Totals over all connections of a process."""

    up_bytes: int = 0
    down_bytes: int = 0
    bulk_bytes: int = 0
    tokens_shipped: int = 0
    tokens_adopted: int = 0
    tokens_passed_on: int = 0
    tokens_restored: int = 0


class Exchange(ABC):
    """The inference rank's end of one connection. It dies with the connection.

    Every method raises TransportError, ControlError or CacheRankDownError when the cache rank is
    down.

    Attributes:
        waited: seconds that a step waited for answers: the current step, or on a GPU the last one
            whose times are known.
    """

    def __init__(
        self,
        connection: Connection,
        config: CacheRankConfig,
        slots: SlotBuffers,
        counters: ExchangeCounters,
        chunk_tokens: int,
        coded_tokens: int,
    ) -> None:
        """Begin; what is exchanged is added to `counters`.

        Args:
            chunk_tokens, coded_tokens: at most so many tokens are shipped at once, as they are and
                as codes, in no more bytes; 0 if none are.
        """
        self.connection = connection
        self.counters = counters
        self.waited = 0.0
        self._config = config
        self._slots = slots
        # Shipments lie behind each other in memory that is used in turn. Where each begins, and the
        # next, is counted on and on.
        size = max(SHIPPED_TOKENS, chunk_tokens) * config.model.bytes_per_token
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.empty(size, dtype=torch.uint8, device=slots.device)
        self._shipments: deque[tuple[int, Pending]] = deque()
        self._next = 0
        self._asking: Pending | None = None
        self._answer: AttendedMessage | None = None
        self._tail_tokens = residency.shared_tail(config) or 0
        self._encoder: PageEncoder | None = None
        if coded_tokens:
            self._encoder = PageEncoder(config, coded_tokens, slots.device)

    @property
    def was_late(self) -> bool:
        """Whether the step waited long enough for answers to count as late."""
        return self.waited > LATE_SECONDS

    def announce(self, step: int, rows: list[ExchangedRow], traced: bool = False) -> None:
        """Tell the cache rank which requests a step exchanges, before its forward pass.

        Without requests, nothing is exchanged, and the answers to the step before are still
        applied.
        """
        if rows:
            announced = [Row(row.sequence.sequence_id, row.position) for row in rows]
            self.connection.control.send(Step(step, announced, traced))

    @abstractmethod
    def finish_step(self) -> None:
        """End the step, whose forward pass has been computed, or on a GPU been queued."""

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """Whether transfers may have been ended, so that what they brought means nothing."""

    @abstractmethod
    def stale_requests(
        self, step: int, sequences: Sequence[SparseSequence]
    ) -> list[SparseSequence]:
        """Return the requests for which a step went on without answers that it should have had.

        Args:
            step: its forward pass has been computed.
            sequences: those that are sparse in it.
        """

    @abstractmethod
    def spans(self) -> list[Span]:
        """Return what happened in the traced steps so far; on a GPU, wait for it."""

    def send_of_layer(self, message: QueryProjection | KeyBasis, tensor: Tensor) -> None:
        """Send what the cache rank must know of a layer; wait until it is gone."""
        self.connection.control.send(message)
        self.connection.link.bulk.send(tensor).wait(self.connection.timeout)
        self.counters.bulk_bytes += tensor.nbytes

    def ship(self, parts: Sequence[tuple[SparseSequence, int]], pool_rows: Tensor) -> None:
        """Send the next tokens of each sequence, so many, in the background.

        Args:
            pool_rows: (n,) int64, of the tokens of one sequence after the other.
        """
        model = self._config.model
        memory = self._make_room(len(pool_rows) * model.bytes_per_token)
        shipment = memory.view(model.torch_dtype).view(bulk_shape(self._config, len(pool_rows)))
        collect_tokens(self._slots.keys, self._slots.values, pool_rows, shipment)
        loads = [Load(sequence.sequence_id, sequence.shipped, count) for sequence, count in parts]
        self._send_shipment(loads[0] if len(loads) == 1 else LoadTogether(loads), shipment)
        for sequence, count in parts:
            sequence.shipped += count

    def ship_pages(self, sequence: SparseSequence, pool_rows: Tensor) -> None:
        """Send the next complete pages of a prompt, as codes, in the background.

        The tokens that are sent next as they are begin `residency.shared_tail` before their end.
        """
        assert self._encoder is not None
        count = len(pool_rows)
        shipment = self._make_room(self._encoder.size(count))
        tokens = self._encoder.room(count)
        collect_tokens(self._slots.keys, self._slots.values, pool_rows, tokens)
        with self._encoding():
            self._encoder.encode(tokens, shipment)
            self._send_pages(sequence, count, shipment)

    def pass_on(self, sequence: SparseSequence, page: Sequence[Tensor]) -> None:
        """Send the next complete page of a prompt as the codes in which it came.

        It goes on as after `ship_pages`.

        Args:
            page: see `PageEncoder.pack`.
        """
        assert self._encoder is not None
        shipment = self._make_room(self._encoder.size(PAGE_TOKENS))
        self._encoder.pack(page, shipment)
        self._send_pages(sequence, PAGE_TOKENS, shipment)
        self.counters.tokens_passed_on += PAGE_TOKENS

    def _send_pages(self, sequence: SparseSequence, count: int, shipment: Tensor) -> None:
        load = Load(sequence.sequence_id, sequence.complete, count, as_codes=True)
        self._send_shipment(load, shipment)
        sequence.complete += count
        sequence.shipped = sequence.complete - self._tail_tokens

    def _make_room(self, size: int) -> Tensor:
        """Memory of the next shipment, (size,) uint8; what was sent from it has to have arrived."""
        start, whole = self._next, len(self._memory)
        if start % whole + size > whole:
            start += -start % whole
        shipments = self._shipments
        while shipments and (shipments[0][1].is_done() or start + size - shipments[0][0] > whole):
            shipments.popleft()[1].wait(self.connection.timeout)
        self._next = start
        return self._memory[start % whole :][:size]

    def _send_shipment(self, message: Load | LoadTogether, shipment: Tensor) -> None:
        self.connection.control.send(message)
        self.counters.bulk_bytes += shipment.nbytes
        self._shipments.append((self._next, self.connection.link.bulk.send(shipment)))
        self._next += -(-shipment.nbytes // _ALIGNMENT) * _ALIGNMENT

    def _encoding(self) -> AbstractContextManager[Any]:
        """Run what is queued inside behind what was gathered; on a GPU, beside the steps."""
        return contextlib.nullcontext()

    def adopt(self, sequence: SparseSequence, names: list[int]) -> None:
        """Let a sequence, which may be new, begin with pages that the cache rank has."""
        self.connection.control.send(Adopt(sequence.sequence_id, names))
        self.counters.tokens_adopted += PAGE_TOKENS * len(names)

    # A verification: all layers of it in order, and nothing else on the bulk channel meanwhile.

    def begin_attending(self, rows: list[Row], width: int) -> None:
        """Let the cache rank attend for requests of which it holds all tokens before a position."""
        self.connection.control.send(Attend(rows, width))
        self._answer = AttendedMessage(self._config, len(rows), width, self._slots.device)

    def attend(self, queries: Tensor) -> tuple[AttendedMessage, Pending]:
        """Send the queries of a layer, (R, width, Hq, D), and post the receive of the answer.

        It takes the memory of the answer for the layer before.
        """
        assert self._answer is not None
        bulk, answer = self.connection.link.bulk, self._answer
        self._asking = bulk.send(queries)  # the answer to it says that it has arrived
        received = bulk.receive(answer.buffer)
        self.counters.up_bytes += queries.nbytes
        self.counters.down_bytes += answer.buffer.nbytes
        return answer, received

    def end_attending(self) -> None:
        """All layers have been queued, and on a CPU answered."""
        return

    def restore(self, names: list[int], pool_rows: Tensor, forward: Any = None) -> None:
        """Bring pages of these names back into pool rows; the host waits for them.

        Args:
            pool_rows: (n,) int64, of the last tokens of these pages; those before are not wanted.
            forward: on a GPU the stream of forward passes, which may still read these rows.
        """
        self.connection.control.send(Restore(names))
        deadline = time.monotonic() + self.connection.timeout
        count = pool_rows.new_zeros(1)
        self._receive_back(count, deadline)
        self._wait_for_pages(deadline)
        tokens = PAGE_TOKENS * len(names)
        if int(count) != tokens:
            raise CacheRankDownError(f"restores {int(count)} tokens of {tokens}")
        unwanted = pool_rows.new_full((tokens - len(pool_rows),), _PADDING_ROW)
        pages = self._pages
        packed = torch.empty(pages.packed_bytes, dtype=torch.uint8, device=self._slots.device)
        for index, rows in enumerate(torch.cat((unwanted, pool_rows)).split(PAGE_TOKENS)):
            if index % _PAGES_UNDER_WAY == 0:
                self._wait_for_pages(deadline)
                deadline = time.monotonic() + self.connection.timeout
            self._receive_back(packed, deadline)
            pages.unpack_page(packed, 0)
            put_tokens(self._slots.keys, self._slots.values, rows, *pages.read_first_page())
        self._wait_for_pages(deadline)
        self.counters.tokens_restored += len(pool_rows)

    def prepare_restore(self) -> None:
        """Take memory for pages that come back, and on a GPU load the kernels that decode them."""
        slots, pages = self._slots, self._pages
        nothing = torch.zeros(pages.packed_bytes, dtype=torch.uint8, device=slots.device)
        pages.unpack_page(nothing, 0)
        nowhere = torch.full((PAGE_TOKENS,), _PADDING_ROW, device=slots.device)
        put_tokens(slots.keys, slots.values, nowhere, *pages.read_first_page())

    @functools.cached_property
    def _pages(self) -> Residency:
        """Holds the page that comes back, in the format in which it comes."""
        config = msgspec.structs.replace(self._config, max_rows=1, score_keys="resident")
        return residency.create(config, 1, self._slots.device)

    def _receive_back(self, tensor: Tensor, deadline: float) -> None:
        """Receive what the cache rank sends on the bulk channel, on a GPU in the background."""
        left = max(_LEAST_WAIT_SECONDS, deadline - time.monotonic())
        self.connection.link.bulk.receive(tensor).wait(left)

    def _wait_for_pages(self, deadline: float) -> None:
        """Let the host wait for what was received in the background, and for what uses it."""
        return

    def close(self) -> None:
        """Drop the channels of a connection that is down."""
        self.connection.control.close()
        self.connection.link.close()

    def _count_messages(self, sizes: tuple[int, int]) -> None:
        up_bytes, down_bytes = sizes
        self.counters.up_bytes += up_bytes
        self.counters.down_bytes += down_bytes

    def _count_tokens(self, sequence: SparseSequence, tokens: int) -> None:
        sequence.statistics.tokens_shipped += tokens
        self.counters.tokens_shipped += tokens
