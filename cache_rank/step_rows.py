"""The rows of a step as kernels are given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class StepRows(NamedTuple):
    """The requests of a step, on the device.

    Attributes:
        slots: (R,) int32 places in the state tensors; -1 is a refused row.
        positions: (R,) int32 of the current tokens.
        counts: (R,) int32 queries in the ring, the current one included.
        page_table: (R, max pages) int32 pages of each row, in order.
        header: (R, 6) int64, see AnswerHeader.
        capacity: no row has more tokens after the step.
        on_host: slot and position of each row, known without asking the device.
    """

    slots: Tensor
    positions: Tensor
    counts: Tensor
    page_table: Tensor
    header: Tensor
    capacity: int
    on_host: Sequence[tuple[int, int]] | None = None

    def numbers(self) -> Sequence[tuple[int, int]]:
        """Slot and position of each row, on the host."""
        if self.on_host is not None:
            return self.on_host
        return list(zip(self.slots.tolist(), self.positions.tolist(), strict=True))
