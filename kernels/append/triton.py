"""Append of a step's tokens to the paged pools, Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.fp8.triton import round_to_fp8
from torch import Tensor

_BLOCK_ELEMENTS = 2048


def append_step(
    up: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    query_ring: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    score_pool: Tensor | None = None,
) -> None:
    """See the reference. One launch; D is a power of two."""
    rows, layers, heads, head_dim = up.shape
    _, pool_layers, kv_heads, page_tokens, _ = key_pool.shape
    query_heads, ring = query_ring.shape[2:4]
    assert heads == query_heads + 2 * kv_heads
    assert up.is_contiguous()
    assert key_pool.is_contiguous()
    assert value_pool.is_contiguous()
    assert query_ring.is_contiguous()
    assert page_table.stride(1) == 1
    block_heads = max(1, min(_BLOCK_ELEMENTS // head_dim, triton.next_power_of_2(heads)))
    _append[(rows, layers, triton.cdiv(heads, block_heads))](
        up,
        key_pool,
        value_pool,
        query_ring,
        key_pool if score_pool is None else score_pool,
        page_table,
        slots,
        positions,
        first_layer,
        page_table.stride(0),
        page_table.shape[1],
        has_score_pool=score_pool is not None,
        layers=layers,
        pool_layers=pool_layers,
        query_heads=query_heads,
        kv_heads=kv_heads,
        ring=ring,
        page_tokens=page_tokens,
        head_dim=head_dim,
        block_heads=block_heads,
    )


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "max_pages"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _append(
    up,
    key_pool,
    value_pool,
    query_ring,
    score_pool,
    page_table,
    slots,
    positions,
    first_layer,
    page_stride,
    max_pages,
    has_score_pool: tl.constexpr,
    layers: tl.constexpr,
    pool_layers: tl.constexpr,
    query_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    ring: tl.constexpr,
    page_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
):
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions + row)
    entry = position // page_tokens % max_pages
    page = tl.load(page_table + row * page_stride + entry).to(tl.int64)

    heads: tl.constexpr = query_heads + 2 * kv_heads
    head = tl.program_id(2) * block_heads + tl.arange(0, block_heads)[:, None]
    dims = tl.arange(0, head_dim)[None, :]
    content = tl.load(
        up + ((row * layers + layer) * heads + head) * head_dim + dims, mask=head < heads
    ).to(key_pool.dtype.element_ty)

    first_query = (slot * pool_layers + first_layer + layer) * query_heads
    in_ring = ((first_query + head) * ring + position % ring) * head_dim
    tl.store(query_ring + in_ring + dims, content, mask=head < query_heads)

    first_key = (page * pool_layers + first_layer + layer) * kv_heads
    key_head = head - query_heads
    in_pool = ((first_key + key_head) * page_tokens + position % page_tokens) * head_dim
    is_key = (key_head >= 0) & (key_head < kv_heads)
    tl.store(key_pool + in_pool + dims, content, mask=is_key)
    if has_score_pool:
        tl.store(score_pool + in_pool + dims, round_to_fp8(content), mask=is_key)

    value_head = key_head - kv_heads
    in_pool = ((first_key + value_head) * page_tokens + position % page_tokens) * head_dim
    is_value = (value_head >= 0) & (value_head < kv_heads)
    tl.store(value_pool + in_pool + dims, content, mask=is_value)


def load_tokens(
    shipment: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    pages: Tensor,
    start: int,
    score_pool: Tensor | None = None,
) -> None:
    """See the reference. One launch; D is a power of two."""
    _, layers, count, kv_heads, head_dim = shipment.shape
    page_tokens = key_pool.shape[3]
    assert shipment.is_contiguous()
    assert key_pool.is_contiguous()
    assert value_pool.is_contiguous()
    block_tokens = max(1, _BLOCK_ELEMENTS // head_dim)
    skipped = max(0, count - pages.shape[0] * page_tokens)
    _load[(triton.cdiv(count - skipped, block_tokens), layers * kv_heads, 2)](
        shipment,
        key_pool,
        value_pool,
        key_pool if score_pool is None else score_pool,
        pages,
        start,
        count,
        skipped,
        pages.shape[0],
        has_score_pool=score_pool is not None,
        layers=layers,
        kv_heads=kv_heads,
        page_tokens=page_tokens,
        head_dim=head_dim,
        block_tokens=block_tokens,
    )


@triton.jit(
    do_not_specialize=["start", "count", "skipped", "page_count"],
    do_not_specialize_on_alignment=["pages"],
)
def _load(
    shipment,
    key_pool,
    value_pool,
    score_pool,
    pages,
    start,
    count,
    skipped,
    page_count,
    has_score_pool: tl.constexpr,
    layers: tl.constexpr,
    kv_heads: tl.constexpr,
    page_tokens: tl.constexpr,
    head_dim: tl.constexpr,
    block_tokens: tl.constexpr,
):
    index = skipped + tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    layer, head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    part = tl.program_id(2)
    is_token = (index < count)[:, None]
    dims = tl.arange(0, head_dim)[None, :]
    source = (part.to(tl.int64) * layers + layer) * count * kv_heads
    source = (source + index * kv_heads + head)[:, None] * head_dim + dims
    content = tl.load(shipment + source, mask=is_token)

    position = start + index
    entry = position // page_tokens % page_count
    page = tl.load(pages + entry, mask=index < count, other=0).to(tl.int64)
    row = ((page * layers + layer) * kv_heads + head) * page_tokens + position % page_tokens
    target = row[:, None] * head_dim + dims
    content = content.to(key_pool.dtype.element_ty)
    if part == 0:
        tl.store(key_pool + target, content, mask=is_token)
        if has_score_pool:
            tl.store(score_pool + target, round_to_fp8(content), mask=is_token)
    else:
        tl.store(value_pool + target, content, mask=is_token)
