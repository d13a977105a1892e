"""Packed 4-bit codes, Triton: functions for kernels.

On a GPU one instruction unpacks four bytes. A kernel that took each byte by itself would be bound
by arithmetic long before it is bound by memory. The interpreter knows no machine instructions, and
does take each byte by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pack_nibbles(low, high):
    """Pack codes in [-8, 15], int32, of low and high nibbles: uint8 of the same shape."""
    return ((low & 15) | ((high & 15) << 4)).to(tl.uint8)


@triton.jit
def low_nibbles(packed, INTERPRETED: tl.constexpr):
    """Unpack the unsigned low nibbles of uint8: int8 of the same shape."""
    if INTERPRETED:
        return (packed & 15).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, 0x0F0F0F0F;", "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
        )


@triton.jit
def high_nibbles(packed, INTERPRETED: tl.constexpr):
    """Unpack the unsigned high nibbles of uint8: int8 of the same shape."""
    if INTERPRETED:
        return (packed >> 4).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0F0F0F0F; }",
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
