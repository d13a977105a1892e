"""The host's accounts of the exchange between ranks that are CPU processes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.measure.timeline import Span
from sglang_ext.exchange.base import Exchange
from sglang_ext.exchange.connection import Connection
from sglang_ext.exchange.host.gate import HostGate
from sglang_ext.exchange.host.transfers import HostTransfers
from sglang_ext.exchange.slots import ExchangedRows, SlotBuffers
from sglang_ext.lifecycle import SparseSequence

MAX_SHIPMENTS_UNDER_WAY = 4
"""At most so many shipments, which each hold a copy of their tokens, are under way."""


class HostExchange(Exchange):
    """The exchange between ranks that are CPU processes; forward passes carry it out."""

    def __init__(
        self, connection: Connection, config: CacheRankConfig, slots: SlotBuffers, gate: HostGate
    ) -> None:
        super().__init__(connection, config, slots)
        self._transfers = HostTransfers(connection, config, slots)
        self._gate = gate
        self._step, self._rows = 0, ExchangedRows()
        self._let_go: dict[int, list[SparseSequence]] = {}
        gate.open(self._transfers)

    def announce(self, step: int, rows: ExchangedRows, traced: bool = False) -> None:
        self._step, self._rows = step, rows
        self._transfers.prepare(step, rows, traced)
        super().announce(step, rows, traced)

    def finish_step(self) -> None:
        """Account for what the forward pass has sent and received.

        Raises:
            TransportError, ControlError, CacheRankDownError: the cache rank was lost in it.
        """
        if self._gate.let_go:
            self._let_go[self._step] = list(self._rows.sequences)
            return
        self.waited = self._transfers.waited
        brought, self._transfers.brought = self._transfers.brought, []
        for sequence, tokens in brought:
            self._count_tokens(sequence, tokens)
        if self._gate.failure is not None:
            raise self._gate.failure
        if self._rows:
            self._count_messages(self._transfers.messages.nbytes(len(self._rows)))

    def missed(self, step: int, sequences: Sequence[SparseSequence]) -> list[SparseSequence]:
        let_go = self._let_go.get(step, [])
        return [sequence for sequence in sequences if sequence in let_go]

    def spans(self) -> list[Span]:
        return self._transfers.take_spans()

    def ship(self, sequence: SparseSequence, pool_rows: Tensor) -> None:
        self._send_prompt(sequence, pool_rows, MAX_SHIPMENTS_UNDER_WAY)

    def close(self) -> None:
        self._gate.close()
        super().close()
