"""The requests of a step as kernels are given them: on the device, a row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.copies import upload
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
    on_host: Sequence[tuple[int, int]]

    @classmethod
    def of_one(cls, pages: Tensor, slot: int, newest: int, device: torch.device) -> BatchMetadata:
        """Make the row of a sequence that is read alone.

        Args:
            pages: (pages,) int32 on the host.
            newest: position of its newest token.
        """
        numbers = torch.tensor([[slot], [newest]], dtype=torch.int32).unbind()
        table, slots, positions = upload((pages.unsqueeze(0), *numbers), device)
        paged = PagedRows(table, slots, positions)
        return cls(paged, slots, slots, slots, newest + 1, [(slot, newest)])

    @property
    def slots(self) -> Tensor:
        """(R,) int32, each row's place in the state tensors."""
        return self.paged.slots

    @property
    def positions(self) -> Tensor:
        """(R,) int32, the position of each row that is meant; see `SelectorStep`."""
        return self.paged.positions
