"""The rows of a step, as the operations on resident tokens take them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class PagedRows(NamedTuple):
    """Which sequence each row of a step is of, where its tokens are, and how many.

    Attributes:
        page_table: (R, max pages) int32, the pages of each row's sequence in order. Entries beyond
            the page of the row's position are not read.
        slots: (R,) int32, each row's place in the state tensors; negative skips the row, which
            leaves alone what is written for the others.
        positions: (R,) int32, the position of each row's newest token.
    """

    page_table: Tensor
    slots: Tensor
    positions: Tensor

    def used(self) -> Iterator[tuple[int, int, int]]:
        """The row, slot and position of each row that is not skipped."""
        places = zip(self.slots.tolist(), self.positions.tolist(), strict=True)
        return ((row, slot, position) for row, (slot, position) in enumerate(places) if slot >= 0)

    def resident(self, pool: Tensor, layers: slice, row: int, position: int) -> Tensor:
        """Read the tokens [0, position] of a row: (L, Hkv, position + 1, width).

        Args:
            pool: (pages, layers, Hkv, P, width).
        """
        pages = self.page_table[row, : position // pool.shape[3] + 1].to(torch.int64)
        tokens = pool[:, layers][pages]  # (pages, L, Hkv, P, width)
        return tokens.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : position + 1]
