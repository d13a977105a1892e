"""Gather of the tokens to ship from the paged pools, Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.fp8.triton import convert
from torch import Tensor

_BLOCK_ELEMENTS = 2048


def gather_step(
    key_pool: Tensor,
    value_pool: Tensor,
    page_table: Tensor,
    slots: Tensor,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two."""
    rows, layers, kv_heads, capacity = entering.shape
    _, pool_layers, _, page_tokens, head_dim = key_pool.shape
    assert key_pool.is_contiguous()
    assert value_pool.is_contiguous()
    assert entering.is_contiguous()
    assert out_keys.is_contiguous()
    assert out_values.is_contiguous()
    assert out_keys.shape == out_values.shape == (*entering.shape, head_dim)
    assert page_table.stride(1) == 1
    block_entries = max(1, min(_BLOCK_ELEMENTS // head_dim, triton.next_power_of_2(capacity)))
    _gather[(rows, layers * kv_heads, triton.cdiv(capacity, block_entries))](
        key_pool,
        value_pool,
        page_table,
        slots,
        entering,
        out_keys,
        out_values,
        first_layer,
        page_table.stride(0),
        layers=layers,
        pool_layers=pool_layers,
        kv_heads=kv_heads,
        page_tokens=page_tokens,
        capacity=capacity,
        head_dim=head_dim,
        block_entries=block_entries,
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
    layers: tl.constexpr,
    pool_layers: tl.constexpr,
    kv_heads: tl.constexpr,
    page_tokens: tl.constexpr,
    capacity: tl.constexpr,
    head_dim: tl.constexpr,
    block_entries: tl.constexpr,
):
    row, unit = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(slots + row) < 0:
        return
    layer, head = unit // kv_heads, unit % kv_heads
    entry = tl.program_id(2) * block_entries + tl.arange(0, block_entries)
    target = (row * layers * kv_heads + unit) * capacity + entry
    position = tl.load(entering + target, mask=entry < capacity, other=-1)
    used = position >= 0
    page = tl.load(page_table + row * page_stride + position // page_tokens, mask=used, other=0)

    unit_of_page = (page.to(tl.int64) * pool_layers + first_layer + layer) * kv_heads + head
    source = unit_of_page * page_tokens + position % page_tokens
    dims = tl.arange(0, head_dim)[None, :]
    source = source[:, None] * head_dim + dims
    target = target[:, None] * head_dim + dims
    used = used[:, None]
    key = tl.load(key_pool + source, mask=used)
    value = tl.load(value_pool + source, mask=used)
    tl.store(out_keys + target, convert(key, out_keys.dtype.element_ty), mask=used)
    tl.store(out_values + target, convert(value, out_values.dtype.element_ty), mask=used)
