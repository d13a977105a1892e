"""The rows of a step or of a shipment, as the operations on resident tokens take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cache_rank.copies import upload


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


class ShippedRow(NamedTuple):
    """Tokens of one sequence in a shipment, as the host knows them.

    Attributes:
        slot: the sequence's place in the state tensors.
        position: that of the first of these tokens.
        first: which token of the shipment that is.
        tokens: how many there are.
    """

    slot: int
    position: int
    first: int
    tokens: int


class Shipment(NamedTuple):
    """New tokens of some sequences, each of which has a row.

    Attributes:
        tokens: (2, layers, n, Hkv, D), keys and values, contiguous.
        rows: whose they are; a position is that of a row's first new token.
        firsts, counts: (R,) int32, which of the tokens are those of each row.
        on_host: each row as the host knows it, so that nobody has to ask the device.
    """

    tokens: Tensor
    rows: PagedRows
    firsts: Tensor
    counts: Tensor
    on_host: Sequence[ShippedRow]

    @classmethod
    def of(cls, tokens: Tensor, page_table: Tensor, on_host: Sequence[ShippedRow]) -> Shipment:
        """Upload what the device must know of a shipment.

        Args:
            page_table: (R, max pages) int32 on the host, up to the last of the new tokens.
        """
        numbers = torch.tensor(list(zip(*on_host, strict=True)), dtype=torch.int32)
        table, numbers = upload((page_table, numbers), tokens.device)
        slots, positions, firsts, counts = numbers
        return cls(tokens, PagedRows(table, slots, positions), firsts, counts, on_host)

    @classmethod
    def of_one(cls, tokens: Tensor, pages: Tensor, slot: int = 0, position: int = 0) -> Shipment:
        """Make the shipment of one sequence, which has these pages, (pages,) int32 on the host."""
        row = ShippedRow(slot, position, 0, tokens.shape[2])
        return cls.of(tokens, pages.unsqueeze(0), [row])

    @property
    def most(self) -> int:
        """The most tokens that a row has."""
        return max(row.tokens for row in self.on_host)

    def in_rings(self) -> Shipment:
        """The same for pools where each slot has one page, which is a ring of its newest tokens."""
        rings = self.rows._replace(page_table=self.rows.slots.unsqueeze(1))
        return self._replace(rows=rings)
