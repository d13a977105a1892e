"""Arithmetic that makes the same codes as the references, Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quotient(numerator, denominator):
    """The float32 quotient, and 0 where the denominator is 0: there all elements are the same."""
    return tl.where(denominator == 0.0, 0.0, tl.div_rn(numerator, denominator))


@triton.jit
def nearest_integers(numbers):
    """Round float32 below 2^22 to the nearest integers, half to even."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def power_below(numbers):
    """The largest power of two that is no larger: exact, and for 0 a tiny one."""
    bits = tl.maximum(numbers, 1e-30).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def is_finite(numbers):
    """Whether float32 numbers are finite."""
    return tl.abs(numbers) < float("inf")
