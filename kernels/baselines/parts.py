"""What the selection kernels share: how programs divide a row, and what it has to choose from."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 64
"""Tokens or pages that a program takes at a time."""

_TARGET_PROGRAMS = 528  # four a multiprocessor of an H200
_MAX_SPLITS = 64


def count_splits(units: int, blocks: int) -> int:
    """Programs that share one unit's tokens: a power of two that fills the GPU."""
    wanted = triton.next_power_of_2(triton.cdiv(_TARGET_PROGRAMS, units))
    return int(max(1, min(wanted, _MAX_SPLITS, triton.next_power_of_2(blocks))))


def padded_group(group: int) -> int:
    """Columns of the matrix unit that the heads of a group take."""
    return int(max(16, triton.next_power_of_2(group)))


@triton.jit
def first_recent(length, sinks, recent, page_tokens: tl.constexpr):
    """As Budget.recent_start_of."""
    wanted = tl.maximum(length - 1 - recent, 0) // page_tokens * page_tokens
    return tl.maximum(wanted, tl.minimum(sinks, length))


@triton.jit
def must_choose(length, sinks, recent, selected, page_tokens: tl.constexpr):
    """Whether there are more candidates than are taken."""
    start = first_recent(length, sinks, recent, page_tokens)
    return start - tl.minimum(sinks, length) > selected


@triton.jit
def load_queries(
    queries,
    unit,
    group: tl.constexpr,
    padded: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dims: tl.constexpr,
):
    """(padded_dims, padded): the queries of one kv head's group as columns."""
    column = tl.arange(0, padded)[None, :]
    dims = tl.arange(0, padded_dims)[:, None]
    return tl.load(
        queries + unit.to(tl.int64) * group * head_dim + column * head_dim + dims,
        mask=(column < group) & (dims < head_dim),
        other=0.0,
    )
