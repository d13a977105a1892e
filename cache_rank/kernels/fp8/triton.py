"""Rounding of tokens to 8 bits, Triton: functions for kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_fp8(tokens):
    """See the reference: the bits are the same except for those of NaN."""
    LARGEST: tl.constexpr = 448.0
    SMALLEST_NORMAL: tl.constexpr = 0.015625
    tokens = tl.clamp(tokens.to(tl.float32), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    # We round first, so that the conversion is exact: the interpreter's own loses carries. Adding
    # and subtracting 1.5 · 2^20 times a power of two leaves three bits below that power.
    bits = tokens.to(tl.uint32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    power = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    addend = tl.maximum(power, SMALLEST_NORMAL) * 1572864.0
    rounded = ((magnitude + addend) - addend).to(tl.uint32, bitcast=True)
    return (rounded | (bits & 0x80000000)).to(tl.float32, bitcast=True).to(tl.float8e4nv)
