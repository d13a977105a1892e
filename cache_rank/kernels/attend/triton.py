"""Attention of a decode step over rows of the KV pool, Triton.

Rows are scattered, so each key and value is read by its own address. The tokens of a request and
KV head are split over programs, whose results a second kernel merges by their log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64
_MOST_SPLITS = 32
_PROGRAMS = 512
"""About so many programs keep a GPU's memory busy."""

_QUERIES = 16
"""The matrix unit takes so many query heads at a time."""


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    picked: Tensor,
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """See the reference. Two launches; D is a power of two, and G is at most 16."""
    requests, query_heads, head_dim = queries.shape
    kv_heads, width = picked.shape[1:]
    group = query_heads // kv_heads
    assert group <= _QUERIES
    assert queries.stride(2) == 1
    assert keys.stride() == values.stride()
    assert keys.stride(2) == 1
    assert picked.is_contiguous()
    assert out.is_contiguous()
    assert row_table.stride(1) == 1
    units = requests * kv_heads
    splits = min(_MOST_SPLITS, triton.next_power_of_2(max(1, _PROGRAMS // units)))
    partial = torch.empty(
        (requests, query_heads, splits, head_dim), dtype=torch.float32, device=out.device
    )
    log_sums = torch.empty(partial.shape[:3], dtype=torch.float32, device=out.device)
    _attend[(splits, units)](
        queries,
        keys,
        values,
        picked,
        row_table,
        slots,
        lengths,
        sparse_from,
        partial,
        log_sums,
        scale * 1.4426950408889634,  # powers of two are faster than those of e
        *queries.stride()[:2],
        *keys.stride()[:2],
        row_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        QUERIES=_QUERIES,
        HEAD_DIM=head_dim,
        WIDTH=width,
        SPLITS=splits,
        BLOCK=_BLOCK,
        EXACT=not queries.is_cuda,  # the interpreter multiplies no bfloat16
        num_warps=4,
        num_stages=3,
    )
    _merge[(requests * query_heads,)](
        partial, log_sums, out, HEAD_DIM=head_dim, SPLITS=splits, num_warps=2
    )


@triton.jit(
    do_not_specialize=["scale", "table_stride"],
    do_not_specialize_on_alignment=["row_table", "slots", "lengths", "sparse_from"],
)
def _attend(
    queries,
    keys,
    values,
    picked,
    row_table,
    slots,
    lengths,
    sparse_from,
    partial,
    log_sums,
    scale,
    request_stride,
    query_stride,
    row_stride,
    head_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program attends to a part of the tokens of one request and KV head."""
    split, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request, head = unit // KV_HEADS, unit % KV_HEADS
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    is_sparse = length >= tl.load(sparse_from + slot)
    tokens = tl.where(is_sparse, tl.minimum(WIDTH, length), length)
    own_rows, all_rows = picked + unit * WIDTH, row_table + slot * table_stride

    in_group, dims = tl.arange(0, QUERIES), tl.arange(0, HEAD_DIM)
    is_query = in_group < GROUP
    query_head = head * GROUP + in_group
    source = request * request_stride + query_head * query_stride
    query = tl.load(
        queries + source[:, None] + dims[None, :], mask=is_query[:, None], other=0.0
    )  # [QUERIES, D]
    if EXACT:
        query = query.to(tl.float32)
    largest = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, HEAD_DIM), tl.float32)
    share = tl.cdiv(tl.cdiv(tokens, SPLITS), BLOCK) * BLOCK
    start = split * share
    for block in tl.range(start, tl.minimum(start + share, tokens), BLOCK):
        token = block + tl.arange(0, BLOCK)
        is_token = token < tokens
        row = tl.load(own_rows + token, mask=is_token & is_sparse, other=0)
        row += tl.load(all_rows + token, mask=is_token & (is_sparse == 0), other=0)
        in_pool = row.to(tl.int64) * row_stride + head * head_stride
        in_pool = in_pool[:, None] + dims[None, :]
        key = tl.load(keys + in_pool, mask=is_token[:, None], other=0.0)  # [BLOCK, D]
        value = tl.load(values + in_pool, mask=is_token[:, None], other=0.0)
        logits = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
        logits = tl.where(is_token[None, :], logits, -1e30)  # [QUERIES, BLOCK]
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.exp2(logits - largest[:, None])
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=1)
        product = tl.dot(weights.to(query.dtype), value.to(query.dtype), input_precision="ieee")
        sums = sums * decay[:, None] + product
    at = ((request * KV_HEADS * GROUP + query_head) * SPLITS + split).to(tl.int64)
    some = tl.maximum(total, 1e-30)
    tl.store(
        partial + at[:, None] * HEAD_DIM + dims[None, :], sums / some[:, None], is_query[:, None]
    )
    tl.store(log_sums + at, tl.where(total > 0, largest + tl.log2(some), -1e30), is_query)


@triton.jit
def _merge(partial, log_sums, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr):
    """One program merges what was computed for one query head."""
    head = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    at = head * SPLITS + split
    log_sum = tl.load(log_sums + at)
    weights = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    weights = weights / tl.sum(weights, axis=0)
    parts = tl.load(partial + at[:, None] * HEAD_DIM + dims[None, :])  # [SPLITS, D]
    tl.store(out + head * HEAD_DIM + dims, tl.sum(parts * weights[:, None], axis=0))
