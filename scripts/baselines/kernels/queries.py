"""Queries of a kv head as the columns of a matrix product, Triton."""

from __future__ import annotations

import triton
import triton.language as tl


def padded_group(group: int) -> int:
    """How many columns of the matrix unit the query heads of a kv head take."""
    return int(max(16, triton.next_power_of_2(group)))


@triton.jit
def load_queries(
    queries,
    unit,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIMS: tl.constexpr,
):
    """Load the GROUP queries of a unit as columns: (PADDED_DIMS, PADDED), 0 beyond them."""
    column = tl.arange(0, PADDED)[None, :]
    dims = tl.arange(0, PADDED_DIMS)[:, None]
    return tl.load(
        queries + unit.to(tl.int64) * GROUP * HEAD_DIM + column * HEAD_DIM + dims,
        mask=(column < GROUP) & (dims < HEAD_DIM),
        other=0.0,
    )
