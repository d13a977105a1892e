"""Attention over tokens held as codes, for every format, Triton.

Codes are split over programs, and the newest tokens have one of their own; what they compute is
merged by log-sum-exp (flash decoding). How a format attends to codes is in its folder.
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
    key_ring,
    value_ring,
    page_table,
    slots,
    positions,
    partial,
    log_sums,
    layer,
    page_stride,
    scale,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTIALS: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    ATTEND: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
    EXACT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program attends to a part of the tokens of one row and KV head.

    Args:
        queries: (R, Hkv, GROUP, D) float32; GROUP is QUERIES times the query heads of a KV head.
        partial, log_sums: see `merge_splits`; PARTIALS of them, the last of newest tokens if there
            are more than SPLITS.
        scale: factor on the logits, of powers of two.
    """
    unit, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, head = unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    slot = tl.load(slots + row).to(tl.int64)
    tokens = tl.where(slot < 0, 0, tl.load(positions + row) + 1)
    coded = coded_tokens(tokens, LAYOUT)
    unit_queries = queries + unit * GROUP * LAYOUT.head_dim
    query = tl.arange(0, PADDED)
    at = (unit * GROUP + query) * PARTIALS + split
    if split < SPLITS:
        groups = coded // LAYOUT.group_tokens
        parts, largest, total = ATTEND(
            key_planes,
            value_planes,
            unit_queries,
            page_table + row * page_stride,
            layer,
            head,
            groups * split // SPLITS * LAYOUT.group_tokens,
            groups * (split + 1) // SPLITS * LAYOUT.group_tokens,
            scale,
            GROUP,
            PADDED,
            STAGES,
            INTERPRETED,
            LAYOUT,
            CONSTANTS,
        )
        for index in tl.static_range(len(parts)):
            _store_sums(parts[index], total, partial, at, query < GROUP, index, LAYOUT)
        _store_log_sums(largest, total, log_sums + at, query < GROUP)
    else:
        sums, largest, total = _attend_newest(
            unit_queries,
            key_ring,
            value_ring,
            (slot * LAYOUT.layers + layer) * LAYOUT.kv_heads + head,
            coded,
            tokens,
            scale,
            QUERIES,
            GROUP,
            PADDED,
            RING_BLOCK,
            LAYOUT,
            EXACT,
        )
        _store_sums(sums, total, partial, at, query < GROUP, 0, LAYOUT)
        _store_log_sums(largest, total, log_sums + at, query < GROUP)


@triton.jit
def _store_sums(sums, total, partial, at, is_query, INDEX: tl.constexpr, LAYOUT: tl.constexpr):
    """Write the normalized channels of part INDEX of queries: (channels, PADDED)."""
    channel = INDEX * sums.shape[0] + tl.arange(0, sums.shape[0])
    target = partial + at[None, :] * LAYOUT.head_dim + channel[:, None]
    tl.store(target, sums / tl.maximum(total, 1e-30)[None, :], mask=is_query[None, :])


@triton.jit
def _store_log_sums(largest, total, log_sums, is_query):
    """Write log-sum-exps, of powers of two; -1e30 where there is no token."""
    log_sum = largest + tl.log2(tl.maximum(total, 1e-30))
    tl.store(log_sums, tl.where(total > 0.0, log_sum, -1e30), mask=is_query)


@triton.jit
def _attend_newest(
    queries,
    keys,
    values,
    ring_unit,
    first,
    tokens,
    scale,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Attend to the tokens [first, tokens) of a ring, each query to those up to its own.

    Returns:
        Sums of values (D, PADDED), and the largest logit and the sum of weights, (PADDED,) each.
    """
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    query, dims = tl.arange(0, PADDED), tl.arange(0, HEAD_DIM)
    source = queries + query[:, None] * HEAD_DIM + dims[None, :]
    numbers = tl.load(source, mask=(query < GROUP)[:, None], other=0.0)
    DTYPE: tl.constexpr = tl.float32 if EXACT else keys.dtype.element_ty
    numbers = tl.trans(numbers.to(DTYPE))
    own = tokens - QUERIES + query // (GROUP // QUERIES)
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    sums = tl.zeros((HEAD_DIM, PADDED), tl.float32)
    for start in tl.range(first, tokens, BLOCK, num_stages=1):
        position = start + tl.arange(0, BLOCK)[:, None]
        held = (ring_unit * LAYOUT.ring + position % LAYOUT.ring) * HEAD_DIM + dims[None, :]
        key = tl.load(keys + held, mask=position < tokens, other=0.0).to(DTYPE)
        value = tl.load(values + held, mask=position < tokens, other=0.0).to(DTYPE)
        seen = (position < tokens) & (position <= own[None, :])
        logits = tl.dot(key, numbers, input_precision="ieee") * scale
        logits = tl.where(seen, logits, -1e30)  # [BLOCK, PADDED]
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=0))
        weights = tl.where(seen, tl.exp2(logits - largest[None, :]), 0.0)
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=0)
        product = tl.dot(tl.trans(value), weights.to(DTYPE), input_precision="ieee")
        sums = sums * decay[None, :] + product
    return sums, largest, total
