"""Where the forward pass and the exchange meet on a CPU: transfers happen in the forward pass."""

from __future__ import annotations

import os
from collections.abc import Callable

from torch import Tensor

from cache_rank.channels.control import ControlError
from cache_rank.channels.transport import TransportError
from sglang_ext.exchange.base import Gate
from sglang_ext.exchange.connection import CacheRankDownError
from sglang_ext.exchange.host.transfers import HostTransfers

LET_GO_VARIABLE = "CACHE_RANK_LET_GO"
"""If this is 1, a loss is as it is between GPUs, where the pass under way cannot be changed."""


class HostGate(Gate):
    """Carries out the transfers of the connection that is open, group by group.

    A cache rank that is lost in a forward pass closes the gate, and the pass goes on without it.

    Attributes:
        failure: what closed the gate in a forward pass, or None.
        let_go: whether passes, since it was lost, go on with their last selection.
    """

    def __init__(self) -> None:
        """Begin closed: there is no connection yet."""
        self.failure: Exception | None = None
        self.let_go = False
        self._lets_go = os.environ.get(LET_GO_VARIABLE) == "1"
        self._transfers: HostTransfers | None = None

    @property
    def is_open(self) -> bool:
        return self._transfers is not None or self.let_go

    def open(self, transfers: HostTransfers) -> None:
        """Let forward passes carry out the transfers of a connection."""
        self._transfers, self.failure, self.let_go = transfers, None, False

    def close(self) -> None:
        """Let forward passes go on without transfers, and let go of what a failure refers to."""
        self._transfers = self.failure = None
        self.let_go = False

    def begin_forward(self) -> None:
        """Nothing is to be timed here."""

    def stage_hidden(self, group: int, hidden: Tensor, residual: Tensor | None) -> None:
        self._while_open(lambda transfers: transfers.stage_hidden(group, hidden, residual))

    def enter_group(self, group: int) -> None:
        self._while_open(lambda transfers: transfers.take_answer(group))

    def stage(
        self, group: int, layer_in_group: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        self._while_open(
            lambda transfers: transfers.stage(group, layer_in_group, queries, keys, values)
        )

    def leave_group(self, group: int) -> None:
        self._while_open(lambda transfers: transfers.leave(group))

    def _while_open(self, action: Callable[[HostTransfers], None]) -> None:
        if self._transfers is None:
            return
        try:
            action(self._transfers)
        except (TransportError, ControlError, CacheRankDownError) as error:
            self.close()
            if self._lets_go:
                self.let_go = True
            else:
                self.failure = error
