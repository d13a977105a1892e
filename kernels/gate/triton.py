"""Flags by which work on one stream waits for work on another, Triton.

A wait is one warp that polls, so it takes nothing from what runs beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_POLLS = 64
"""Reads of the flag between looks at the host's memory, which is far away."""


def signal(flags: Tensor, index: int, count: Tensor | int) -> None:
    """See the reference."""
    on_device = isinstance(count, Tensor)
    _signal[(1,)](
        flags,
        index,
        count if on_device else flags,
        0 if on_device else count,
        count_on_device=on_device,
        num_warps=1,
    )


def raise_flag(flags: Tensor, index: int, number: Tensor) -> None:
    """See the reference."""
    _raise_flag[(1,)](flags, index, number, num_warps=1)


def lower_flag(flags: Tensor, index: int) -> None:
    """See the reference."""
    _lower_flag[(1,)](flags, index, num_warps=1)


def refresh(copy: Tensor, source: Tensor) -> None:
    """See the reference."""
    _refresh[(1,)](copy, source, num_warps=1)


def wait_for(flags: Tensor, index: int, count: Tensor | int, accepts: Tensor) -> None:
    """See the reference."""
    on_device = isinstance(count, Tensor)
    _wait_for[(1,)](
        flags,
        index,
        count if on_device else flags,
        0 if on_device else count,
        accepts,
        count_on_device=on_device,
        polls=_POLLS,
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=["index", "count"],
    do_not_specialize_on_alignment=["flags", "counts"],
)
def _signal(flags, index, counts, count, count_on_device: tl.constexpr):
    if count_on_device:
        tl.store(flags + index, tl.load(counts))
    else:
        tl.store(flags + index, count.to(tl.int64))


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
    do_not_specialize=["index", "count"],
    do_not_specialize_on_alignment=["flags", "counts", "accepts"],
)
def _wait_for(
    flags, index, counts, count, accepts, count_on_device: tl.constexpr, polls: tl.constexpr
):
    least = tl.load(counts) if count_on_device else count.to(tl.int64)
    held = tl.load(flags + index, volatile=True)
    accepted = 1
    while (held < least) & (accepted != 0):
        left = polls
        while (held < least) & (left > 0):
            held = tl.load(flags + index, volatile=True)
            left -= 1
        accepted = tl.load(accepts, volatile=True)
