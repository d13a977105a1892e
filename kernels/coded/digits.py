"""Float queries as digits of 8 bits, for products with codes as integers of 8 bits, Triton.

Channels are handled in two halves, as bytes of nibbles hold them: [0, D / 2) and [D / 2, D).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_LEAST_COLUMNS = 8
"""A product on a matrix unit has at least this many columns."""


def digit_columns(queries: Tensor, out: Tensor, digits: int) -> int:
    """How many columns a query head has: one a digit, and zeros as far as the matrix unit needs.

    Args:
        queries: (R, L, Hq, D).
        out: (R, L, Hkv, capacity).
        digits: how many digits a query has.
    """
    group = triton.next_power_of_2(queries.shape[2] // out.shape[2])
    return max(triton.next_power_of_2(digits), _LEAST_COLUMNS // group)


@triton.jit
def load_query_half(
    unit_queries, half, scale, GROUP: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Load half 0 or 1 of the channels of a unit's queries, times `scale`: (PADDED, D / 2)."""
    heads = tl.arange(0, PADDED)
    dims = half * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    return tl.load(unit_queries + at, mask=(heads < GROUP)[:, None], other=0.0) * scale


@triton.jit
def query_digits(
    query,
    unit,
    DIGITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write float queries in 2 or 3 digits of 8 bits, whose products with integers are exact.

    A query is rounded to a multiple of unit · 2^(3 - 8 DIGITS), so that no element is off by more
    than 2^(2 - 8 DIGITS) of the largest.

    Args:
        query: (ROWS, HALF) float32, below 2 units.
        unit: (ROWS,) powers of two, see `power_below`.

    Returns:
        (ROWS * COLUMNS, HALF) int8: the digits of each row, the most significant first, and zeros.
    """
    # The bits of 1.5 · 2^23 + an integer are those of 1.5 · 2^23, 0x4B400000, + the integer.
    fixed = query * (_digit_range(DIGITS) / unit)[:, None] + 12582912.0
    BIAS: tl.constexpr = 0x8080 if DIGITS == 2 else 0x808080  # 128 in each digit
    biased = fixed.to(tl.int32, bitcast=True) + (BIAS - 0x4B400000)
    column = tl.arange(0, COLUMNS)[None, :, None]
    byte = (biased[:, None, :] >> 8 * tl.maximum(DIGITS - 1 - column, 0)) & 255
    digit = tl.where(column < DIGITS, byte - 128, 0).to(tl.int8)
    return tl.reshape(digit, (ROWS * COLUMNS, HALF))


@triton.jit
def sum_of_digits(
    products,
    DIGITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Add up the products with the digits of queries to those with the queries, in their units.

    Args:
        products: (TOKENS, PADDED * COLUMNS) int32, each below 2^24.

    Returns:
        (TOKENS, PADDED) float32.
    """
    digit = tl.arange(0, PADDED * COLUMNS) % COLUMNS
    weight = tl.exp2(8.0 * (DIGITS - 1 - digit)) / _digit_range(DIGITS)
    weighted = tl.reshape(products.to(tl.float32) * weight[None, :], (TOKENS, PADDED, COLUMNS))
    return tl.sum(weighted, axis=2)


@triton.jit
def _digit_range(DIGITS: tl.constexpr):
    """What `query_digits` makes of a unit: twice that, and the bias, fit the digits."""
    return 8192.0 if DIGITS == 2 else 2097152.0
