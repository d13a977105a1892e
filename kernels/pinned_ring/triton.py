"""Letters between a host and its device, Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.pinned_ring.reference import PART, parts
from torch import Tensor


def collect(box: Tensor, turns: Tensor, into: Tensor) -> None:
    """See the reference."""
    letters, width = box.shape
    assert turns.shape[0] == parts(width)
    _collect[(parts(width),)](box, turns, into, letters, width, part=PART)


def post(values: Tensor, box: Tensor, newest: Tensor, number: Tensor) -> None:
    """See the reference."""
    letters, width = box.shape
    assert values.is_contiguous()
    block = triton.next_power_of_2(width)
    warps = min(max(block // 1024, 1), 32)
    _post[(1,)](values, box, newest, number, letters, width, block=block, num_warps=warps)


@triton.jit(do_not_specialize_on_alignment=["box", "turns", "into"])
def _collect(box, turns, into, letters, width, part: tl.constexpr):
    program = tl.program_id(0)
    before = tl.load(turns + program)
    columns = program * part + tl.arange(0, part)
    held = columns < width
    # Not what a cache of the device may hold of the host's memory.
    letter = tl.load(box + before % letters * width + columns, mask=held, volatile=True)
    tl.store(into + columns, letter, mask=held)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turns + program, before + 1)


@triton.jit(do_not_specialize_on_alignment=["values", "box", "newest", "number"])
def _post(values, box, newest, number, letters, width, block: tl.constexpr):
    chosen = tl.load(number)
    columns = tl.arange(0, block)
    held = (columns < width) & (chosen != 0)
    letter = tl.load(values + columns, mask=held)
    tl.store(box + chosen % letters * width + columns, letter, mask=held)
    tl.debug_barrier()  # every thread has left its part
    tl.atomic_xchg(newest, chosen, mask=chosen != 0, sem="release", scope="sys")
