"""Attention to tokens held as codes, for every format, Triton.

The tokens of a row and KV head are split over programs, whose results are merged by their
log-sum-exp (flash decoding). How a format attends to codes is in its folder.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cache_rank.kernels.coded.tokens import coded_tokens


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
        partial, log_sums: see `merge_splits`.
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
