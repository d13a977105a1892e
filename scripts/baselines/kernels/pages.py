"""Bounds of pages, and scores of pages by them (Quest section 3.2), Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scripts.baselines.kernels.candidates import (
    BLOCK,
    count_splits,
    first_recent,
    must_choose,
)
from scripts.baselines.kernels.queries import load_queries, padded_group
from scripts.baselines.kernels.reference import Budget


def build_bounds(
    keys: Tensor,
    req_to_token: Tensor,
    slots: Tensor,
    starts: Tensor,
    stops: Tensor,
    max_pages: int,
    page: int,
    pool_page: int,
    bounds: Tensor,
) -> None:
    """See the reference. One launch."""
    _, kv_heads, head_dim = keys.shape
    assert keys.is_contiguous()
    assert bounds.is_contiguous()
    _build_bounds[(max_pages, slots.shape[0])](
        keys,
        req_to_token,
        slots,
        starts,
        stops,
        bounds,
        req_to_token.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIMS=triton.next_power_of_2(head_dim),
        PAGE_TOKENS=page,
        POOL_PAGE=pool_page,
        num_warps=1,
    )


def score_pages(
    queries: Tensor,
    bounds: Tensor,
    req_to_token: Tensor,
    slots: Tensor,
    lengths: Tensor,
    budget: Budget,
    pool_page: int,
    out: Tensor,
) -> None:
    """See the reference. One launch.

    max(q · min, q · max) is max(q, 0) · max + min(q, 0) · min, so the bound is two products.
    """
    rows, query_heads, head_dim = queries.shape
    kv_heads, pages = bounds.shape[1], out.shape[-1]
    assert queries.is_contiguous()
    assert bounds.is_contiguous()
    assert out.is_contiguous()
    splits = count_splits(rows * kv_heads, triton.cdiv(pages, BLOCK))
    _score_pages[(splits, rows * kv_heads)](
        queries,
        bounds,
        req_to_token,
        slots,
        lengths,
        out,
        req_to_token.stride(0),
        pages,
        budget.sinks,
        budget.recent,
        budget.selected,
        KV_HEADS=kv_heads,
        GROUP=query_heads // kv_heads,
        PADDED=padded_group(query_heads // kv_heads),
        HEAD_DIM=head_dim,
        PADDED_DIMS=max(16, triton.next_power_of_2(head_dim)),
        PAGE_TOKENS=budget.page,
        POOL_PAGE=pool_page,
        BLOCK=BLOCK,
        EXACT=bounds.dtype == torch.float32 or not bounds.is_cuda,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["context"])
def _build_bounds(
    keys,
    req_to_token,
    slots,
    starts,
    stops,
    bounds,
    context,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIMS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    POOL_PAGE: tl.constexpr,
):
    """One program takes the bounds of one page of one row, for all kv heads."""
    row = tl.program_id(1)
    page = tl.load(starts + row).to(tl.int32) // PAGE_TOKENS + tl.program_id(0)
    if (page + 1) * PAGE_TOKENS <= tl.load(stops + row):
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context + page * PAGE_TOKENS
        rows = tl.load(tokens + tl.arange(0, PAGE_TOKENS)).to(tl.int64)
        entry = tl.load(tokens).to(tl.int64) // POOL_PAGE
        dims = tl.arange(0, PADDED_DIMS)
        inside = dims < HEAD_DIM
        for head in range(KV_HEADS):
            key = tl.load(
                keys + (rows * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :],
                mask=inside[None, :],
                other=0.0,
            ).to(tl.float32)  # [PAGE_TOKENS, PADDED_DIMS]
            to = bounds + (entry * KV_HEADS + head) * 2 * HEAD_DIM + dims
            tl.store(to, tl.max(key, axis=0).to(bounds.dtype.element_ty), inside)
            tl.store(to + HEAD_DIM, tl.min(key, axis=0).to(bounds.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["context", "pages", "sinks", "recent", "selected"])
def _score_pages(
    queries,
    bounds,
    req_to_token,
    slots,
    lengths,
    out,
    context,
    pages,
    sinks,
    recent,
    selected,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIMS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    POOL_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program scores every num_programs(0)-th block of a unit's candidate pages.

    A unit is a row and kv head. A row whose candidates are all taken is left alone.
    """
    unit = tl.program_id(1)
    row = unit // KV_HEADS
    head = unit % KV_HEADS
    length = tl.load(lengths + row).to(tl.int32)
    if must_choose(length, sinks, recent, selected, PAGE_TOKENS):
        # The queries, split by sign: what multiplies largest and what multiplies smallest keys.
        DTYPE: tl.constexpr = tl.float32 if EXACT else bounds.dtype.element_ty
        query = load_queries(queries, unit, GROUP, PADDED, HEAD_DIM, PADDED_DIMS).to(tl.float32)
        positive = tl.maximum(query, 0.0).to(DTYPE)  # [PADDED_DIMS, PADDED]
        negative = tl.minimum(query, 0.0).to(DTYPE)
        is_head = (tl.arange(0, PADDED) < GROUP)[None, :]
        dims = tl.arange(0, PADDED_DIMS)[None, :]
        # Block after block: the bounds of its pages, and their products with the queries.
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context
        last = first_recent(length, sinks, recent, PAGE_TOKENS) // PAGE_TOKENS
        step = tl.num_programs(0) * BLOCK
        for start in range(sinks // PAGE_TOKENS + tl.program_id(0) * BLOCK, last, step):
            page = start + tl.arange(0, BLOCK)
            valid = page < last
            entry = (
                tl.load(tokens + page * PAGE_TOKENS, mask=valid, other=0).to(tl.int64) // POOL_PAGE
            )
            at = bounds + (entry * KV_HEADS + head)[:, None] * 2 * HEAD_DIM + dims
            mask = valid[:, None] & (dims < HEAD_DIM)
            largest = tl.load(at, mask=mask, other=0.0).to(DTYPE)  # [BLOCK, PADDED_DIMS]
            smallest = tl.load(at + HEAD_DIM, mask=mask, other=0.0).to(DTYPE)
            bound = tl.dot(largest, positive, input_precision="ieee")  # [BLOCK, PADDED]
            bound = tl.dot(smallest, negative, acc=bound, input_precision="ieee")
            bound = tl.where(is_head, bound, -float("inf"))
            tl.store(out + unit.to(tl.int64) * pages + page, tl.max(bound, axis=1), valid)
