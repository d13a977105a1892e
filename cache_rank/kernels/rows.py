"""The rows of a step, as the operations on resident tokens take them."""

from __future__ import annotations

from typing import NamedTuple

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
