"""Rings of pinned memory between a host and its GPU, plain torch: the specification.

A ring is pinned memory of the host, (rows, width) int64, which the GPU addresses too. Work that is
queued on the GPU, or held by a graph, reads and writes its rows in turn, without a call of the
driver.
"""

from __future__ import annotations

from torch import Tensor

BLOCK = 1024
"""One program reads this many numbers of a row."""


def blocks(width: int) -> int:
    """How many programs read a row of so many numbers."""
    return -(-width // BLOCK)


def collect(ring: Tensor, collected: Tensor, into: Tensor) -> None:
    """Read the next row of a ring that the host writes.

    Args:
        ring: (rows, width) int64.
        collected: (blocks,) int64, how many rows were read before; counted here. Each program
            counts for itself, since none knows when the others have read theirs.
        into: (width,) int64 on the device, written in place.
    """
    into.copy_(ring[int(collected[0]) % ring.shape[0]])
    collected += 1


def post(values: Tensor, ring: Tensor, newest: Tensor, number: Tensor) -> None:
    """Write a row of a ring that the host reads, over the oldest one, and then its number.

    Args:
        values: int64 of any shape, what the row takes.
        ring: (rows, elements of `values`) int64; row `number % rows` is written.
        newest: (1,) int64, pinned beside the ring: a host that sees a number here sees its row.
        number: (1,) int64 on the device, the number of the row; where it is 0, nothing is written.
    """
    if int(number):
        ring[int(number) % ring.shape[0]] = values.reshape(-1)
        newest.copy_(number)
