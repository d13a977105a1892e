"""The requests of a step as kernels are given them: on the device, a row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.kernels.rows import PagedRows


class BatchMetadata(NamedTuple):
    """A row for each request of a step, on the device.

    Attributes:
        paged: slot, position and pages of each row; a refused row has slot -1.
        counts: (R,) int32, queries in the ring, the current one included.
        budgets: (R,) int32, slots that each row may fill.
        header: (R, 6) int64, see AnswerHeader.
        capacity: no row has more tokens after the step.
        on_host: slot and position of each row, so that nobody has to ask the device.
    """

    paged: PagedRows
    counts: Tensor
    budgets: Tensor
    header: Tensor
    capacity: int
    on_host: Sequence[tuple[int, int]] | None = None

    @property
    def slots(self) -> Tensor:
        """(R,) int32, each row's place in the state tensors."""
        return self.paged.slots

    @property
    def positions(self) -> Tensor:
        """(R,) int32, position of each row's current token."""
        return self.paged.positions

    def numbers(self) -> Sequence[tuple[int, int]]:
        """Slot and position of each row, on the host."""
        if self.on_host is not None:
            return self.on_host
        return list(zip(self.slots.tolist(), self.positions.tolist(), strict=True))

    def row_at(self, index: int, position: int) -> BatchMetadata:
        """One of the rows as a step of its own, whose current token is at `position`."""
        one = slice(index, index + 1)
        # Copies, because kernels are compiled anew for numbers that lie at odd addresses.
        return BatchMetadata(
            PagedRows(
                self.paged.page_table[one].clone(),
                self.slots[one].clone(),
                torch.full_like(self.positions[one], position),
            ),
            self.counts[one].clone(),
            self.budgets[one].clone(),
            self.header[one],
            capacity=position + 1,
        )
