"""Packed codes of 4 bits and less, Triton: functions for kernels.

On a GPU a shift and a mask unpack four bytes at once. A kernel that took each byte by itself would
be bound by arithmetic long before it is bound by memory. The interpreter knows no machine
instructions, and does take each byte by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack_nibbles(low, high):
    """Pack codes in [-8, 15], int32, of low and high nibbles: uint8 of the same shape."""
    return ((low & 15) | ((high & 15) << 4)).to(tl.uint8)


@triton.jit
def unpack_codes(packed, INDEX: tl.constexpr, BITS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Unpack code INDEX, from the lowest bits up, of bytes of unsigned codes of BITS bits each.

    Returns:
        int8 of the shape of `packed`.
    """
    SHIFT: tl.constexpr = INDEX * BITS
    MASK: tl.constexpr = (1 << BITS) - 1
    if INTERPRETED:
        return ((packed >> SHIFT) & MASK).to(tl.int8)
    else:
        # A register holds four bytes: it is shifted as a whole, and each byte keeps its own bits.
        MASKS: tl.constexpr = MASK * 0x01010101
        return tl.inline_asm_elementwise(
            f"shr.b32 $0, $1, {SHIFT}; and.b32 $0, $0, {MASKS};",
            "=r,r",
            [packed],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )


@triton.jit
def signed(nibbles):
    """Read nibbles, integers in [0, 15], as two's complement: float32 in [-8, 7]."""
    return ((nibbles ^ 8) - 8).to(tl.float32)
