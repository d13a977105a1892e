"""Attention of a decode step over rows of the KV pool, Triton.

Rows are scattered, so each key and value is read by its own address. The tokens of a request and
KV head are split over programs, whose results a second kernel merges by their log-sum-exp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.dependent import (
    dependent_launch,
    has_dependents,
    let_dependents_start,
    wait_for_kernel_ahead,
)


class Launch(NamedTuple):
    """How the work is laid out; the result depends on it by rounding alone."""

    block: int = 32
    """Tokens at a time."""

    warps: int = 4

    stages: int = 5
    """Keys and values are read (stages - 1) / 2 blocks ahead, and the numbers of their rows as far
    ahead of them."""

    programs: int = 396
    """Three on each of the 132 multiprocessors of an H100 or H200."""

    most_splits: int = 32

    least_share: int = 64
    """Tokens worth a program of their own."""


LAUNCH = Launch()

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
    budgets: Tensor,
    always: int,
    scale: float,
    out: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
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
    splits = min(LAUNCH.most_splits, max(1, LAUNCH.programs // units))
    partial = torch.empty(
        (requests, query_heads, splits, head_dim), dtype=torch.float32, device=out.device
    )
    log_sums = torch.empty(partial.shape[:3], dtype=torch.float32, device=out.device)
    _attend[(units, splits)](
        queries,
        keys,
        values,
        picked,
        row_table,
        slots,
        lengths,
        sparse_from,
        budgets,
        partial,
        log_sums,
        scale * k_scale * 1.4426950408889634,  # powers of two are faster than those of e
        v_scale,
        *queries.stride()[:2],
        *keys.stride()[:2],
        row_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        QUERIES=_QUERIES,
        HEAD_DIM=head_dim,
        WIDTH=width,
        ALWAYS=always,
        SPLITS=splits,
        LEAST_SHARE=LAUNCH.least_share,
        BLOCK=LAUNCH.block,
        EXACT=not queries.is_cuda,  # the interpreter multiplies no bfloat16
        num_warps=LAUNCH.warps,
        num_stages=LAUNCH.stages,
        HAS_DEPENDENTS=has_dependents(out),
    )
    merge_splits(partial, log_sums, out, None, **dependent_launch(out))


def merge_splits(
    partial: Tensor, log_sums: Tensor, out: Tensor, total: Tensor | None, **dependent: Any
) -> None:
    """Merge what was computed for parts of the tokens. One launch.

    Args:
        partial, log_sums: (..., splits, D) and (..., splits) float32, of powers of two; 0 and -1e30
            where a part has no token.
        out, total: (..., D) and natural log-sum-exps, (...) float32, written in place.
        dependent: options of a dependent launch.
    """
    splits, head_dim = partial.shape[-2:]
    _merge[(partial.numel() // (splits * head_dim),)](
        partial,
        log_sums,
        out,
        total,
        splits,
        HEAD_DIM=head_dim,
        PADDED_SPLITS=triton.next_power_of_2(splits),
        num_warps=2,
        **(dependent or {"DEPENDENT": False}),
    )


@triton.jit(
    do_not_specialize=["scale", "v_scale", "table_stride"],
    do_not_specialize_on_alignment=["row_table", "slots", "lengths", "sparse_from", "budgets"],
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
    budgets,
    partial,
    log_sums,
    scale,
    v_scale,
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
    ALWAYS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST_SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_DEPENDENTS: tl.constexpr,
):
    """One program attends to a part of the tokens of one request and KV head."""
    let_dependents_start(HAS_DEPENDENTS)
    unit, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, head = unit // KV_HEADS, unit % KV_HEADS
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    is_sparse = length >= tl.load(sparse_from + slot)
    attended = tl.minimum(tl.load(budgets + request) + ALWAYS, length)
    tokens = tl.where(is_sparse, attended, length)
    rows = tl.where(is_sparse, picked + unit * WIDTH, row_table + slot * table_stride)

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
    share = tl.cdiv(tokens, tl.minimum(SPLITS, tl.maximum(1, tokens // LEAST_SHARE)))
    start = split * share
    end = tl.minimum(start + share, tokens)
    for block in tl.range(start, end, BLOCK):
        token = block + tl.arange(0, BLOCK)
        is_token = token < end
        row = tl.load(rows + token, mask=is_token, other=0)
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
        partial + at[:, None] * HEAD_DIM + dims[None, :],
        sums * (v_scale / some)[:, None],
        is_query[:, None],
    )
    tl.store(log_sums + at, tl.where(total > 0, largest + tl.log2(some), -1e30), is_query)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    partial,
    log_sums,
    out,
    total,
    splits,
    HEAD_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program merges what was computed for one query head."""
    wait_for_kernel_ahead(DEPENDENT)
    head = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, PADDED_SPLITS), tl.arange(0, HEAD_DIM)
    at = head * splits + split
    is_split = split < splits
    log_sum = tl.load(log_sums + at, mask=is_split, other=-1e30)
    largest = tl.max(log_sum, axis=0)
    weights = tl.exp2(log_sum - largest)
    if total is not None:
        of_all = (largest + tl.log2(tl.sum(weights, axis=0))) * 0.6931471805599453
        tl.store(total + head, tl.where(largest > -1e29, of_all, float("-inf")))
    weights = weights / tl.sum(weights, axis=0)
    parts = tl.load(
        partial + at[:, None] * HEAD_DIM + dims[None, :], mask=is_split[:, None], other=0.0
    )  # [PADDED_SPLITS, D]
    tl.store(out + head * HEAD_DIM + dims, tl.sum(parts * weights[:, None], axis=0))
