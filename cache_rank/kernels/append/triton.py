"""The newest tokens enter the paged pools, Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.rows import PagedRows, Shipment

_BLOCK_ELEMENTS = 2048
"""A program moves at most this many elements."""


def append_step(
    up: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    query_ring: Tensor,
    rows: PagedRows,
    first_layer: int,
) -> None:
    """See the reference. One launch; D is a power of two."""
    count, layers, heads, head_dim = up.shape
    _, pool_layers, kv_heads, page_tokens, _ = key_pool.shape
    query_heads, ring = query_ring.shape[2:4]
    assert heads == query_heads + 2 * kv_heads
    assert up[:1].is_contiguous()
    assert key_pool.is_contiguous()
    assert value_pool.is_contiguous()
    assert query_ring.is_contiguous()
    assert rows.page_table.stride(1) == 1
    block_heads = max(1, min(_BLOCK_ELEMENTS // head_dim, triton.next_power_of_2(heads)))
    _append[(count, layers, triton.cdiv(heads, block_heads))](
        up,
        key_pool,
        value_pool,
        query_ring,
        *rows,
        first_layer,
        up.stride(0),
        rows.page_table.stride(0),
        rows.page_table.shape[1],
        LAYERS=layers,
        POOL_LAYERS=pool_layers,
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        RING=ring,
        PAGE_TOKENS=page_tokens,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
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
    page_table,
    slots,
    positions,
    first_layer,
    up_stride,
    page_stride,
    max_pages,
    LAYERS: tl.constexpr,
    POOL_LAYERS: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    RING: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One program stores BLOCK_HEADS heads of one row's token in one layer.

    Heads are counted through the queries, the keys and the values of the token.
    """
    # Where the token goes: a page of the pools, and an entry of the query ring.
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions + row)
    entry = position // PAGE_TOKENS % max_pages
    page = tl.load(page_table + row * page_stride + entry).to(tl.int64)

    # The heads as they came.
    HEADS: tl.constexpr = QUERY_HEADS + 2 * KV_HEADS
    head = tl.program_id(2) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    dims = tl.arange(0, HEAD_DIM)[None, :]  # [1, D]
    content = tl.load(
        up + row * up_stride + (layer * HEADS + head) * HEAD_DIM + dims, mask=head < HEADS
    ).to(key_pool.dtype.element_ty)  # [BLOCK_HEADS, D]

    # Queries go to the ring, keys and values to the pools; a block may hold some of each.
    first_query = (slot * POOL_LAYERS + first_layer + layer) * QUERY_HEADS
    in_ring = ((first_query + head) * RING + position % RING) * HEAD_DIM
    tl.store(query_ring + in_ring + dims, content, mask=head < QUERY_HEADS)

    first_key = (page * POOL_LAYERS + first_layer + layer) * KV_HEADS
    key_head = head - QUERY_HEADS
    in_pool = ((first_key + key_head) * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_DIM
    is_key = (key_head >= 0) & (key_head < KV_HEADS)
    tl.store(key_pool + in_pool + dims, content, mask=is_key)

    value_head = key_head - KV_HEADS
    in_pool = ((first_key + value_head) * PAGE_TOKENS + position % PAGE_TOKENS) * HEAD_DIM
    is_value = (value_head >= 0) & (value_head < KV_HEADS)
    tl.store(value_pool + in_pool + dims, content, mask=is_value)


def load_tokens(shipment: Shipment, key_pool: Tensor, value_pool: Tensor) -> None:
    """See the reference. One launch; D is a power of two."""
    _, layers, count, kv_heads, head_dim = shipment.tokens.shape
    page_tokens, width = key_pool.shape[3], shipment.rows.page_table.shape[1]
    assert shipment.tokens.is_contiguous()
    assert key_pool.is_contiguous()
    assert value_pool.is_contiguous()
    assert shipment.rows.page_table.stride(1) == 1
    block_tokens = max(1, _BLOCK_ELEMENTS // head_dim)
    blocks = triton.cdiv(min(shipment.most, width * page_tokens), block_tokens)
    _load[(blocks, layers * kv_heads * 2, len(shipment.on_host))](
        shipment.tokens,
        key_pool,
        value_pool,
        *shipment.rows,
        shipment.firsts,
        shipment.counts,
        count,
        shipment.rows.page_table.stride(0),
        width,
        LAYERS=layers,
        KV_HEADS=kv_heads,
        PAGE_TOKENS=page_tokens,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
    )


@triton.jit(
    do_not_specialize=["whole", "page_stride", "max_pages"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions", "firsts", "counts"],
)
def _load(
    shipment,
    key_pool,
    value_pool,
    page_table,
    slots,
    positions,
    firsts,
    counts,
    whole,
    page_stride,
    max_pages,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """One program stores keys, or values, of BLOCK_TOKENS tokens of a row in one head of a layer.

    The shipment has `whole` tokens.
    """
    # What the shipment holds of the row: the newest tokens that its pages have room for.
    row = tl.program_id(2)
    count = tl.load(counts + row)
    skipped = tl.maximum(0, count - max_pages * PAGE_TOKENS)
    index = skipped + tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    unit, part = tl.program_id(1) // 2, tl.program_id(1) % 2
    layer, head = unit // KV_HEADS, unit % KV_HEADS
    is_token = (index < count)[:, None]
    dims = tl.arange(0, HEAD_DIM)[None, :]
    token = (part.to(tl.int64) * LAYERS + layer) * whole + tl.load(firsts + row) + index
    source = (token * KV_HEADS + head)[:, None] * HEAD_DIM + dims
    content = tl.load(shipment + source, mask=is_token)  # [BLOCK_TOKENS, D]

    # Where each token goes.
    position = tl.load(positions + row) + index
    entry = page_table + row * page_stride + position // PAGE_TOKENS % max_pages
    page = tl.load(entry, mask=index < count, other=0).to(tl.int64)
    place = ((page * LAYERS + layer) * KV_HEADS + head) * PAGE_TOKENS + position % PAGE_TOKENS
    target = place[:, None] * HEAD_DIM + dims
    content = content.to(key_pool.dtype.element_ty)
    if part == 0:
        tl.store(key_pool + target, content, mask=is_token)
    else:
        tl.store(value_pool + target, content, mask=is_token)
