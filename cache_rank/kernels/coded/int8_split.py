"""Float queries split into two int8 each, for exact products with int8 codes, Triton.

Channels are handled in two halves, as bytes of nibbles hold them: [0, D / 2) and [D / 2, D).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_LEAST_COLUMNS = 8
"""A product on a matrix unit has at least this many columns."""

_INT8_PAIR_RANGE = tl.constexpr(16256.0)
"""Half of what the numbers that `split_int8` takes are below, in their units."""


def int8_columns(queries: Tensor, out: Tensor) -> int:
    """How many columns a query head has: two of int8, and zeros as far as the matrix unit needs.

    Args:
        queries: (R, L, Hq, D).
        out: (R, L, Hkv, ...).
    """
    group = triton.next_power_of_2(queries.shape[2] // out.shape[2])
    return max(2, _LEAST_COLUMNS // group)


@triton.jit
def load_query_half(
    unit_queries,
    half,
    scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr = 1,
):
    """Load half 0 or 1 of the channels of a unit's queries, times `scale`.

    Returns:
        (PADDED * COLUMNS, D / 2) float32: each head once; or twice, as `split_int8` takes them,
        and zeros.
    """
    row = tl.arange(0, PADDED * COLUMNS)
    dims = half * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)
    at = (row // COLUMNS)[:, None] * HEAD_DIM + dims[None, :]
    used = holds_int8(row, GROUP, COLUMNS)[:, None]
    return tl.load(unit_queries + at, mask=used, other=0.0) * scale


@triton.jit
def holds_int8(row, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Whether rows of heads in COLUMNS columns are one of the two int8 of one of GROUP heads."""
    return (row // COLUMNS < GROUP) & (row % COLUMNS < 2)


@triton.jit
def unit_of_rows(largest):
    """The unit of rows of numbers, whose largest are given, in which they fit two int8."""
    return tl.maximum(largest, 1e-30) / _INT8_PAIR_RANGE


@triton.jit
def unit_of_heads(units, COLUMNS: tl.constexpr, PADDED: tl.constexpr):
    """Of the units of rows of heads in columns, those of the heads: (PADDED,)."""
    return tl.max(tl.reshape(units, (PADDED, COLUMNS)), axis=1)


@triton.jit
def split_int8(numbers, COLUMNS: tl.constexpr):
    """Round numbers to integers and split these into two int8, whose products with codes are exact.

    Args:
        numbers: (heads * COLUMNS, n) float32, below twice `_INT8_PAIR_RANGE`; see `holds_int8`.

    Returns:
        int8 of the same shape: of each row the upper byte, the lower one, and zeros.
    """
    # The bits of 1.5 · 2^23 + an integer end in its 16 bits. Both int8 are signed: 128, which is
    # added to each of them and flipped again, carries into the upper one.
    integers = (numbers + (12582912.0 + 0x8080)).to(tl.int32, bitcast=True) ^ 0x8080
    column = tl.arange(0, numbers.shape[0])[:, None] % COLUMNS
    return (integers >> tl.where(column == 0, 8, 0)).to(tl.int8)


@triton.jit
def sum_int8_products(products, COLUMNS: tl.constexpr, PADDED: tl.constexpr, TOKENS: tl.constexpr):
    """Add up the products with the two int8 of integers to those with the integers.

    Args:
        products: (TOKENS, PADDED * COLUMNS) int32, each below 2^22.

    Returns:
        (TOKENS, PADDED) float32.
    """
    of_heads = tl.reshape(products, (TOKENS, PADDED, COLUMNS))
    if COLUMNS == 2:
        first, second = tl.split(of_heads)
        total = (first << 8) + second
    else:
        column = tl.arange(0, COLUMNS)[None, None, :]
        total = tl.sum(of_heads << tl.where(column == 0, 8, 0), axis=2)
    return total.to(tl.float32)
