"""Attention of a decode step over rows of the KV pool, Triton.

Rows are scattered, so each key and value is read by its own address. The tokens of a request and
KV head are split over programs, whose results a second kernel merges by their log-sum-exp.

Keys and values in FP8 are read as words of two channels, which lie in the operands of the matrix
unit as 16-bit numbers do. What is multiplied are two parts, the even and the odd channels.
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
    """Tokens at a time, of 16 bits; of FP8 twice as many."""

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

ONE_EACH = Launch(block=64, warps=2, programs=264)
"""Of rows of at most _SHORT bytes, if a program has all tokens of a request and KV head, and all
programs run at the same time, two on a multiprocessor."""

_SHORT = 128
"""Of longer rows two such programs do not fit the shared memory of a multiprocessor."""

_QUERIES = 16
"""The matrix unit takes so many query heads at a time."""

_OF_HALF = tl.constexpr(256.0)
"""What a number of FP8 is in units of the float16 with its exponent and mantissa."""


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
    batch_invariant: bool = False,
) -> None:
    """See the reference. D is a power of two, and G is at most 16.

    One launch, or two where the tokens of a request are split.
    """
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
    launch, units = LAUNCH, requests * kv_heads
    splits = launch.most_splits
    if not batch_invariant:  # sums over tokens are cut as suits the number of requests
        splits = min(splits, max(1, launch.programs // units))
    if splits == 1 and units <= ONE_EACH.programs and head_dim * keys.itemsize <= _SHORT:
        launch = ONE_EACH
    block = launch.block
    if keys.dtype == torch.float8_e4m3fn:
        keys, values = keys.view(torch.int16), values.view(torch.int16)
        block, v_scale = 2 * block, v_scale * _OF_HALF.value
    partial, log_sums = out, None
    if splits > 1:
        partial = out.new_empty((*out.shape[:2], splits, head_dim), dtype=torch.float32)
        log_sums = out.new_empty(partial.shape[:3], dtype=torch.float32)
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
        LEAST_SHARE=launch.least_share,
        BLOCK=block,
        INTERPRETED=not queries.is_cuda,  # which multiplies no bfloat16
        num_warps=launch.warps,
        num_stages=launch.stages,
        HAS_DEPENDENTS=splits > 1 and has_dependents(out),
    )
    if log_sums is not None:
        one_of_each = {"first": 0, "queries": 1, "part": 1, "KV_HEADS": 1, "GROUP": 1}
        _merge_splits(partial, log_sums, out, None, **one_of_each, **dependent_launch(out))


def merge_by_query(
    partial: Tensor, log_sums: Tensor, first: int, out: Tensor, total: Tensor
) -> None:
    """Merge what queries of a KV head have attended to in parts of the tokens. One launch.

    Args:
        partial, log_sums: (R, Hkv, n, splits, D) and (R, Hkv, n, splits) float32, of powers of two;
            0 and -1e30 where a part has no token.
        first: of the Q * G queries of a KV head, which n are meant.
        out, total: (R, Q, Hq, D) and natural log-sum-exps, (R, Q, Hq) float32; theirs are written.
    """
    queries, query_heads = total.shape[1:]
    kv_heads, part = partial.shape[1:3]
    of_part = {"first": first, "queries": queries, "part": part}
    by_head = {"KV_HEADS": kv_heads, "GROUP": query_heads // kv_heads}
    _merge_splits(partial, log_sums, out, total, **of_part, **by_head, DEPENDENT=False)


def _merge_splits(
    partial: Tensor, log_sums: Tensor, out: Tensor, total: Tensor | None, **options: Any
) -> None:
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
        **options,
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
    INTERPRETED: tl.constexpr,
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

    PARTS: tl.constexpr = 2 if keys.dtype.element_ty == tl.int16 else 1
    in_group, word = tl.arange(0, QUERIES), tl.arange(0, HEAD_DIM // PARTS)
    is_query = in_group < GROUP
    query_head = head * GROUP + in_group
    source = queries + (request * request_stride + query_head * query_stride)[:, None]
    # [QUERIES, D / PARTS] each
    query = [
        tl.load(source + (PARTS * word + i)[None, :], mask=is_query[:, None], other=0.0)
        for i in (0, 1)[:PARTS]
    ]
    if PARTS == 2:
        # Keys are exact in float16, and of queries it keeps more bits than bfloat16 has.
        query = [(query[i].to(tl.float32) * scale).to(tl.float16) for i in (0, 1)]
        scale = 1.0
    if INTERPRETED:
        query = [query[i].to(tl.float32) for i in (0, 1)[:PARTS]]
    TYPE: tl.constexpr = query[0].dtype
    UNIT: tl.constexpr = _OF_HALF if PARTS == 2 else 1.0
    largest = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = [tl.zeros((QUERIES, HEAD_DIM // PARTS), tl.float32) for _ in (0, 1)[:PARTS]]
    share = tl.cdiv(tokens, tl.minimum(SPLITS, tl.maximum(1, tokens // LEAST_SHARE)))
    start = split * share
    end = tl.minimum(start + share, tokens)
    for block in tl.range(start, end, BLOCK):
        token = block + tl.arange(0, BLOCK)
        is_token = token < end
        row = tl.load(rows + token, mask=is_token, other=0)
        in_pool = row.to(tl.int64) * row_stride + head * head_stride
        in_pool = in_pool[:, None] + word[None, :]  # [BLOCK, D / PARTS]
        key = tl.load(keys + in_pool, mask=is_token[:, None], other=0.0)
        value = tl.load(values + in_pool, mask=is_token[:, None], other=0.0)
        logits = tl.zeros((QUERIES, BLOCK), tl.float32)
        for i in tl.static_range(PARTS):
            part = tl.trans(_part(key, i, TYPE, INTERPRETED))
            logits = tl.dot(query[i], part, logits, input_precision="ieee")
        logits = tl.where(is_token[None, :], logits * UNIT * scale, -1e30)
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.exp2(logits - largest[:, None])
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=1)
        weights = weights.to(TYPE)
        sums = [
            sums[i] * decay[:, None]
            + tl.dot(weights, _part(value, i, TYPE, INTERPRETED), input_precision="ieee")
            for i in (0, 1)[:PARTS]
        ]
    at = ((request * KV_HEADS * GROUP + query_head) * SPLITS + split).to(tl.int64)
    some = tl.maximum(total, 1e-30)
    for i in tl.static_range(PARTS):
        target = partial + at[:, None] * HEAD_DIM + (PARTS * word + i)[None, :]
        tl.store(target, sums[i] * (v_scale / some)[:, None], is_query[:, None])
    if SPLITS > 1:
        tl.store(log_sums + at, tl.where(total > 0, largest + tl.log2(some), -1e30), is_query)


@triton.jit
def _part(numbers, PART: tl.constexpr, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The numbers as TYPE; of words of two in FP8 those of a part, in units of `_OF_HALF`."""
    if numbers.dtype != tl.int16:
        return numbers.to(TYPE)
    elif INTERPRETED:
        byte = (numbers >> (8 * PART)) & 0xFF
        half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(TYPE)
    else:
        # Sign, exponent and mantissa of two go where those of float16 are, shorter by a bit and by
        # seven. 0xEA is (first and second) or third.
        HOW: tl.constexpr = (
            "shl.b32 s, $1, 8; shl.b32 t, $1, 7;"
            if PART == 0
            else "mov.b32 s, $1; shr.b32 t, $1, 1;"
        )
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, t; " + HOW + " and.b32 t, t, 0x3F803F80;"
            " lop3.b32 $0, s, 0x80008000, t, 0xEA; }",
            "=r,r",
            [numbers],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit(do_not_specialize=["splits", "first", "queries", "part"])
def _merge(
    partial,
    log_sums,
    out,
    total,
    splits,
    first,
    queries,
    part,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program merges what was computed for one query: of a row and KV head, one of `part`."""
    wait_for_kernel_ahead(DEPENDENT)
    program = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, PADDED_SPLITS), tl.arange(0, HEAD_DIM)
    at = program * splits + split
    unit, number = program // part, first + program % part
    token = unit // KV_HEADS * queries + number // GROUP
    head = (token * KV_HEADS + unit % KV_HEADS) * GROUP + number % GROUP
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
