"""Letters between a host and its device, plain torch: the specification.

A box is pinned memory of the host, (letters, width) int64, which the device sees too. Work that is
queued, or held by a graph, takes and leaves letters there in turn, without a call of the driver.
"""

from __future__ import annotations

from torch import Tensor

PART = 1024
"""Numbers of a letter that one program takes."""


def parts(width: int) -> int:
    """How many programs take a letter of so many numbers."""
    return -(-width // PART)


def collect(box: Tensor, turns: Tensor, into: Tensor) -> None:
    """Take the next letter.

    Args:
        box: (letters, width) int64.
        turns: (parts,) int64, letters taken before, counted here: by each program for itself, as
            none knows when the others have read theirs.
        into: (width,) int64, where the letter goes.
    """
    into.copy_(box[int(turns[0]) % box.shape[0]])
    turns += 1


def post(values: Tensor, box: Tensor, newest: Tensor, number: Tensor) -> None:
    """Leave a letter in the place of the one that came so many letters before, then its number.

    Args:
        values: int64, of any shape: the letter.
        box: (letters, elements of `values`) int64.
        newest: (1,) int64 beside the box: who sees a number there sees its letter.
        number: (1,) int64, of the letter; of 0, none is left.
    """
    if int(number):
        box[int(number) % box.shape[0]] = values.reshape(-1)
        newest.copy_(number)
