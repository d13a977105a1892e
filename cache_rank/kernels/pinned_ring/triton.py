"""Rings of pinned memory between a host and its GPU, Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.pinned_ring.reference import BLOCK, blocks


def collect(ring: Tensor, collected: Tensor, into: Tensor) -> None:
    """See the reference."""
    rows, width = ring.shape
    assert collected.shape[0] == blocks(width)
    _collect[(blocks(width),)](ring, collected, into, rows, width, BLOCK=BLOCK)


def post(values: Tensor, ring: Tensor, newest: Tensor, number: Tensor) -> None:
    """See the reference."""
    rows, width = ring.shape
    assert values.is_contiguous()
    block = triton.next_power_of_2(width)
    warps = min(max(block // 1024, 1), 32)
    _post[(1,)](values, ring, newest, number, rows, width, BLOCK=block, num_warps=warps)


@triton.jit(do_not_specialize_on_alignment=["ring", "collected", "into"])
def _collect(ring, collected, into, rows, width, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    before = tl.load(collected + program)
    column = program * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    # Volatile: a cache of the device may hold what the host's memory was before.
    row = tl.load(ring + before % rows * width + column, mask=inside, volatile=True)
    tl.store(into + column, row, mask=inside)
    tl.debug_barrier()  # every thread has read the count
    tl.store(collected + program, before + 1)


@triton.jit(do_not_specialize_on_alignment=["values", "ring", "newest", "number"])
def _post(values, ring, newest, number, rows, width, BLOCK: tl.constexpr):
    chosen = tl.load(number)
    column = tl.arange(0, BLOCK)
    inside = (column < width) & (chosen != 0)
    row = tl.load(values + column, mask=inside)
    tl.store(ring + chosen % rows * width + column, row, mask=inside)
    tl.debug_barrier()  # every thread has written its part of the row
    tl.atomic_xchg(newest, chosen, mask=chosen != 0, sem="release", scope="sys")
