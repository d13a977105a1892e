"""Attention to tokens held as codes, for every format, Triton.

The tokens of a row and KV head are split over programs, whose results are merged by their
log-sum-exp (flash decoding). How a format attends to codes is in its folder.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.attend.triton import merge_by_query
from cache_rank.kernels.coded.reference import by_kv_head
from cache_rank.kernels.coded.tokens import coded_tokens

LEAST_QUERIES = 8
"""The matrix unit multiplies codes with so many queries at a time."""

_MULTIPROCESSORS = 132
"""Of an H100 or H200, which are kept busy with attention to codes."""

_MOST_SPLITS = 64
"""The codes of a row and KV head are split over at most so many programs."""


def attend_grouped(
    queries: Tensor,
    kv_heads: int,
    at_once: int,
    launch: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Attend with queries (R, Q, Hq, D), of each KV head at most so many at once.

    `launch` attends with queries (R, Hkv, queries, D), and returns what `merge_by_query` takes.

    Returns:
        Outputs (R, Q, Hq, D) and log-sum-exps (R, Q, Hq).
    """
    grouped = by_kv_head(queries, kv_heads)
    out, total = grouped.new_empty(queries.shape), grouped.new_empty(queries.shape[:3])
    for first in range(0, grouped.shape[2], at_once):
        part = grouped[:, :, first : first + at_once].contiguous()
        merge_by_query(*launch(part), first, out, total)
    return out, total


def empty_splits(grouped: Tensor, programs: int) -> tuple[Tensor, Tensor]:
    """Memory of what is merged, where a multiprocessor runs so many programs at once."""
    splits = _MULTIPROCESSORS * programs // max(1, grouped.shape[0] * grouped.shape[1])
    splits = min(_MOST_SPLITS, max(1, splits))
    partial = grouped.new_empty((*grouped.shape[:3], splits, grouped.shape[3]))
    return partial, grouped.new_empty(partial.shape[:4])


@triton.jit(
    do_not_specialize=["layer", "page_stride", "scale"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def attend_split(
    queries,
    key_planes,
    value_planes,
    page_table,
    slots,
    positions,
    partial,
    log_sums,
    layer,
    page_stride,
    scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
    ATTEND: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program attends to a part of the tokens of one row and KV head.

    Args:
        queries: (R, Hkv, GROUP, D) float32; GROUP is Q times the query heads of a KV head.
        scale: factor on the logits, of powers of two.
        partial, log_sums: see `merge_by_query`.
    """
    unit, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits = tl.num_programs(1)  # of few requests there are many, and all are one kernel
    row, head = unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    tokens = tl.where(tl.load(slots + row) < 0, 0, tl.load(positions + row) + 1)
    groups = coded_tokens(tokens, LAYOUT) // LAYOUT.group_tokens
    if LAYOUT.unfinished:
        groups = tl.cdiv(tokens, LAYOUT.group_tokens)
    stop = groups * (split + 1) // splits * LAYOUT.group_tokens
    if LAYOUT.unfinished:
        stop = tl.minimum(stop, tokens)
    parts, largest, total = ATTEND(
        key_planes,
        value_planes,
        queries + unit * GROUP * LAYOUT.head_dim,
        page_table + row * page_stride,
        layer,
        head,
        groups * split // splits * LAYOUT.group_tokens,
        stop,
        scale,
        GROUP,
        PADDED,
        STAGES,
        INTERPRETED,
        LAYOUT,
        CONSTANTS,
    )
    query = tl.arange(0, PADDED)
    at = (unit * GROUP + query) * splits + split
    some = tl.maximum(total, 1e-30)
    WORDS: tl.constexpr = LAYOUT.head_dim // len(parts)
    for part in tl.static_range(len(parts)):
        channel = part // 2 * 2 * WORDS + 2 * tl.arange(0, WORDS) + part % 2
        target = partial + at[None, :] * LAYOUT.head_dim + channel[:, None]
        tl.store(target, parts[part] / some[None, :], mask=(query < GROUP)[None, :])
    log_sum = tl.where(total > 0.0, largest + tl.log2(some), -1e30)
    tl.store(log_sums + at, log_sum, mask=query < GROUP)
