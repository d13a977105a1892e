"""Tokens that enter a working set are read from the paged pools, Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.wire.reference import wire_width
from cache_rank.kernels.wire.triton import store_tokens

_BLOCK_ELEMENTS = 2048
"""A program moves at most this many elements of keys, and as many of values."""


def gather_step(
    key_pool: Tensor,
    value_pool: Tensor,
    rows: PagedRows,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two."""
    count, layers, kv_heads, capacity = entering.shape
    _, pool_layers, _, page_tokens, head_dim = key_pool.shape
    assert key_pool.is_contiguous()
    assert value_pool.is_contiguous()
    assert entering.is_contiguous()
    assert out_keys.is_contiguous()
    assert out_values.is_contiguous()
    width = wire_width(head_dim, out_keys.dtype)
    assert out_keys.shape == out_values.shape == (*entering.shape, width)
    assert rows.page_table.stride(1) == 1
    block_entries = max(1, min(_BLOCK_ELEMENTS // head_dim, triton.next_power_of_2(capacity)))
    _gather[(count, layers * kv_heads, triton.cdiv(capacity, block_entries))](
        key_pool,
        value_pool,
        rows.page_table,
        rows.slots,
        entering,
        out_keys,
        out_values,
        first_layer,
        rows.page_table.stride(0),
        LAYERS=layers,
        POOL_LAYERS=pool_layers,
        KV_HEADS=kv_heads,
        PAGE_TOKENS=page_tokens,
        CAPACITY=capacity,
        HEAD_DIM=head_dim,
        BLOCK_ENTRIES=block_entries,
    )


@triton.jit(
    do_not_specialize=["first_layer", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "entering"],
)
def _gather(
    key_pool,
    value_pool,
    page_table,
    slots,
    entering,
    out_keys,
    out_values,
    first_layer,
    page_stride,
    LAYERS: tl.constexpr,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CAPACITY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
):
    """One program reads K and V of BLOCK_ENTRIES entering tokens of one row, layer and kv head."""
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(slots + row) < 0:
        return
    layer, head = unit // KV_HEADS, unit % KV_HEADS
    entry = tl.program_id(2) * BLOCK_ENTRIES + tl.arange(0, BLOCK_ENTRIES)
    target = (row * LAYERS * KV_HEADS + unit) * CAPACITY + entry
    position = tl.load(entering + target, mask=entry < CAPACITY, other=-1)
    used = position >= 0
    page = tl.load(page_table + row * page_stride + position // PAGE_TOKENS, mask=used, other=0)

    # From the page of each token to its entry of the message.
    unit_of_page = (page.to(tl.int64) * POOL_LAYERS + first_layer + layer) * KV_HEADS + head
    source = unit_of_page * PAGE_TOKENS + position % PAGE_TOKENS
    source = source[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    key = tl.load(key_pool + source, mask=used[:, None])  # [BLOCK_ENTRIES, D]
    value = tl.load(value_pool + source, mask=used[:, None])
    store_tokens(out_keys, target, key, used, HEAD_DIM)
    store_tokens(out_values, target, value, used, HEAD_DIM)
