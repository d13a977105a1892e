"""Bounds of Quest's pages and their scores, Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cache_rank_kernels.baselines.parts import (
    BLOCK,
    count_splits,
    first_recent,
    load_queries,
    must_choose,
    padded_group,
)
from cache_rank_kernels.baselines.reference import Budget
from torch import Tensor


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
        kv_heads=kv_heads,
        head_dim=head_dim,
        padded_dims=triton.next_power_of_2(head_dim),
        page_tokens=page,
        pool_page=pool_page,
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

    max(q * min, q * max) is max(q, 0) * max + min(q, 0) * min, so the bound is two products.
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
        kv_heads=kv_heads,
        group=query_heads // kv_heads,
        padded=padded_group(query_heads // kv_heads),
        head_dim=head_dim,
        padded_dims=max(16, triton.next_power_of_2(head_dim)),
        page_tokens=budget.page,
        pool_page=pool_page,
        block=BLOCK,
        exact=bounds.dtype == torch.float32 or not bounds.is_cuda,
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
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dims: tl.constexpr,
    page_tokens: tl.constexpr,
    pool_page: tl.constexpr,
):
    row = tl.program_id(1)
    page = tl.load(starts + row).to(tl.int32) // page_tokens + tl.program_id(0)
    if (page + 1) * page_tokens <= tl.load(stops + row):
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context + page * page_tokens
        rows = tl.load(tokens + tl.arange(0, page_tokens)).to(tl.int64)
        entry = tl.load(tokens).to(tl.int64) // pool_page
        dims = tl.arange(0, padded_dims)
        inside = dims < head_dim
        for head in range(kv_heads):
            key = tl.load(
                keys + (rows * kv_heads + head)[:, None] * head_dim + dims[None, :],
                mask=inside[None, :],
                other=0.0,
            ).to(tl.float32)
            to = bounds + (entry * kv_heads + head) * 2 * head_dim + dims
            tl.store(to, tl.max(key, axis=0).to(bounds.dtype.element_ty), inside)
            tl.store(to + head_dim, tl.min(key, axis=0).to(bounds.dtype.element_ty), inside)


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
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dims: tl.constexpr,
    page_tokens: tl.constexpr,
    pool_page: tl.constexpr,
    block: tl.constexpr,
    exact: tl.constexpr,
):
    unit = tl.program_id(1)
    row = unit // kv_heads
    head = unit % kv_heads
    length = tl.load(lengths + row).to(tl.int32)
    if must_choose(length, sinks, recent, selected, page_tokens):
        dtype: tl.constexpr = tl.float32 if exact else bounds.dtype.element_ty
        query = load_queries(queries, unit, group, padded, head_dim, padded_dims).to(tl.float32)
        positive = tl.maximum(query, 0.0).to(dtype)
        negative = tl.minimum(query, 0.0).to(dtype)
        is_head = (tl.arange(0, padded) < group)[None, :]
        dims = tl.arange(0, padded_dims)[None, :]
        tokens = req_to_token + tl.load(slots + row).to(tl.int64) * context
        last = first_recent(length, sinks, recent, page_tokens) // page_tokens
        step = tl.num_programs(0) * block
        for start in range(sinks // page_tokens + tl.program_id(0) * block, last, step):
            page = start + tl.arange(0, block)
            valid = page < last
            entry = (
                tl.load(tokens + page * page_tokens, mask=valid, other=0).to(tl.int64) // pool_page
            )
            at = bounds + (entry * kv_heads + head)[:, None] * 2 * head_dim + dims
            mask = valid[:, None] & (dims < head_dim)
            largest = tl.load(at, mask=mask, other=0.0).to(dtype)
            smallest = tl.load(at + head_dim, mask=mask, other=0.0).to(dtype)
            bound = tl.dot(largest, positive, input_precision="ieee")
            bound = tl.dot(smallest, negative, acc=bound, input_precision="ieee")
            bound = tl.where(is_head, bound, -float("inf"))
            tl.store(out + unit.to(tl.int64) * pages + page, tl.max(bound, axis=1), valid)
