"""Flags by which work on one stream waits for work on another, plain torch: the specification.

With CUDA events that a graph records, a wait that was queued while an earlier run of the graph was
under way appeared to be satisfied by that run. A flag that counts leaves no doubt: a wait names the
count it waits for, or takes one of those that it counts.
"""

from __future__ import annotations

import time

from torch import Tensor


def signal(flags: Tensor, index: int, count: Tensor | int) -> None:
    """Set a flag, when all earlier work of the stream is done.

    Args:
        flags: int64, of which entry `index` is written. Counts only grow.
        index: which flag.
        count: its value, or (1,) int64 that holds it when the work runs.
    """
    flags[index] = count


def raise_flag(flags: Tensor, index: int, number: Tensor) -> None:
    """Raise a flag once more, when all earlier work of the stream is done.

    Args:
        flags: int64, how often each has been raised and not been lowered.
        index: which flag.
        number: (1,) int64; of 0, the flag stays as it is.
    """
    flags[index] += int(number) != 0


def lower_flag(flags: Tensor, index: int) -> None:
    """Lower a flag once, which has been seen to be raised."""
    flags[index] -= 1


def refresh(copy: Tensor, source: Tensor) -> None:
    """Copy a number to where kernels read it faster.

    Args:
        copy: (1,), of the dtype of `source`.
        source: (1,), which may be pinned host memory that the host changes.
    """
    copy.copy_(source)


def wait_for(flags: Tensor, index: int, count: Tensor | int, accepts: Tensor) -> None:
    """Hold the stream until a flag has reached a count.

    Args:
        flags: int64.
        index: which flag.
        count: least value, or (1,) int64 that holds it when the work runs.
        accepts: (1,) int32; the wait ends when it is 0. It may be pinned host memory, so that the
            host can end a wait for something that will never happen.
    """
    while int(flags[index]) < int(count) and int(accepts):
        time.sleep(1e-4)
