"""Flags by which work on one stream waits for work on another, plain torch: the specification.

Flags are int64 counts on the device. They take the place of CUDA events that a graph records: a
wait for such an event, queued while an earlier run of the graph was under way, appeared to be
satisfied by that run. A flag that counts leaves no doubt, since a wait names the count that it
waits for, or takes one of those that it counts.
"""

from __future__ import annotations

import time

from torch import Tensor


def signal(flags: Tensor, index: int, count: Tensor) -> None:
    """Set a flag to a count, when all earlier work of the stream is done.

    Args:
        flags: int64, of which entry `index` is written. Counts only grow.
        index: which flag.
        count: (1,) int64, read when the work runs.
    """
    flags[index] = count


def raise_flag(flags: Tensor, index: int, number: Tensor) -> None:
    """Raise a flag by one, when all earlier work of the stream is done.

    Args:
        flags: int64, how often each flag has been raised and not been lowered.
        index: which flag.
        number: (1,) int64; where it is 0, the flag stays as it is.
    """
    flags[index] += int(number) != 0


def lower_flag(flags: Tensor, index: int) -> None:
    """Lower a flag by one, after it was seen to be raised."""
    flags[index] -= 1


def refresh(copy: Tensor, source: Tensor) -> None:
    """Copy a number to where kernels read it faster.

    Args:
        copy: (1,), of the dtype of `source`.
        source: (1,), which may be pinned host memory that the host changes.
    """
    copy.copy_(source)


def wait_for(
    flags: Tensor, index: int, count: Tensor, accepts: Tensor, waiter: Tensor, given_up: Tensor
) -> None:
    """Hold the stream until a flag has reached a count.

    Args:
        flags: int64.
        index: which flag.
        count: (1,) int64, the least count; read when the work runs.
        accepts: (1,) int32; the wait ends when it is 0. It may be pinned host memory, so that the
            host can end a wait for something that will never happen.
        waiter: (1,) int64, the number of who waits.
        given_up: (n,) int64, which may be pinned host memory: where the wait ended without the
            count, entry `waiter` % n becomes the number of who has waited.
    """
    while (held := int(flags[index])) < int(count) and int(accepts):
        time.sleep(1e-4)
    if held < int(count):
        given_up[int(waiter) % given_up.numel()] = int(waiter)
