"""Letters between a host and its device, Triton: one small program each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def collect(box: Tensor, turn: Tensor, into: Tensor) -> None:
    """See the reference."""
    letters, width = box.shape
    _collect[(1,)](box, turn, into, letters, width, **_shape(width))


def post(values: Tensor, box: Tensor, newest: Tensor, number: Tensor) -> None:
    """See the reference."""
    letters, width = box.shape
    assert values.is_contiguous()
    _post[(1,)](values, box, newest, number, letters, width, **_shape(width))


def _shape(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": min(max(block // 1024, 1), 32)}


@triton.jit(do_not_specialize_on_alignment=["box", "turn", "into"])
def _collect(box, turn, into, letters, width, block: tl.constexpr):
    before = tl.load(turn)
    columns = tl.arange(0, block)
    held = columns < width
    # Not what a cache of the device may hold of the host's memory.
    letter = tl.load(box + before % letters * width + columns, mask=held, volatile=True)
    tl.store(into + columns, letter, mask=held)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn, before + 1)


@triton.jit(do_not_specialize_on_alignment=["values", "box", "newest", "number"])
def _post(values, box, newest, number, letters, width, block: tl.constexpr):
    chosen = tl.load(number)
    columns = tl.arange(0, block)
    held = (columns < width) & (chosen != 0)
    letter = tl.load(values + columns, mask=held)
    tl.store(box + chosen % letters * width + columns, letter, mask=held)
    tl.debug_barrier()  # every thread has left its part
    tl.atomic_xchg(newest, chosen, mask=chosen != 0, sem="release", scope="sys")
