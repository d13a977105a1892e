"""Flags by which work on one stream waits for work on another, Triton.

A wait is one warp that polls: a graph can hold it, and it takes next to nothing from what runs
beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_POLLS = 64
"""A wait reads the flag this often between looks at the host's memory, which is far away."""


def signal(flags: Tensor, index: int, count: Tensor) -> None:
    """See the reference."""
    _signal[(1,)](flags, index, count, num_warps=1)


def raise_flag(flags: Tensor, index: int, number: Tensor) -> None:
    """See the reference."""
    _raise_flag[(1,)](flags, index, number, num_warps=1)


def lower_flag(flags: Tensor, index: int) -> None:
    """See the reference."""
    _lower_flag[(1,)](flags, index, num_warps=1)


def refresh(copy: Tensor, source: Tensor) -> None:
    """See the reference."""
    _refresh[(1,)](copy, source, num_warps=1)


def wait_for(
    flags: Tensor, index: int, count: Tensor, accepts: Tensor, waiter: Tensor, given_up: Tensor
) -> None:
    """See the reference."""
    _wait_for[(1,)](
        flags,
        index,
        count,
        accepts,
        waiter,
        given_up,
        ENTRIES=given_up.numel(),
        POLLS=_POLLS,
        num_warps=1,
    )


@triton.jit(do_not_specialize=["index"], do_not_specialize_on_alignment=["flags", "count"])
def _signal(flags, index, count):
    tl.store(flags + index, tl.load(count))


# Flags are raised and lowered on streams that do not wait for each other.
@triton.jit(do_not_specialize=["index"], do_not_specialize_on_alignment=["flags", "number"])
def _raise_flag(flags, index, number):
    tl.atomic_add(flags + index, (tl.load(number) != 0).to(tl.int64))


@triton.jit(do_not_specialize=["index"], do_not_specialize_on_alignment=["flags"])
def _lower_flag(flags, index):
    tl.atomic_add(flags + index, tl.full((), -1, tl.int64))


@triton.jit(do_not_specialize_on_alignment=["copy", "source"])
def _refresh(copy, source):
    tl.store(copy, tl.load(source, volatile=True))


@triton.jit(
    do_not_specialize=["index"],
    do_not_specialize_on_alignment=["flags", "count", "accepts", "waiter", "given_up"],
)
def _wait_for(
    flags, index, count, accepts, waiter, given_up, ENTRIES: tl.constexpr, POLLS: tl.constexpr
):
    least = tl.load(count)
    held = tl.load(flags + index, volatile=True)
    accepted = 1
    while (held < least) & (accepted != 0):
        left = POLLS
        while (held < least) & (left > 0):
            held = tl.load(flags + index, volatile=True)
            left -= 1
        accepted = tl.load(accepts, volatile=True)
    if held < least:
        number = tl.load(waiter)
        tl.store(given_up + number % ENTRIES, number)
