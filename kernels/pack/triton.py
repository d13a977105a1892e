"""Packing of a layer's q, k and v, Triton. It runs inside the decode graph, once a layer."""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.pack import reference
from torch import Tensor
from triton.language.extra.cuda import globaltimer

_BLOCK_ELEMENTS = 2048


def pack_layer(
    staging: Tensor,
    exchange_index: Tensor,
    layer_in_group: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    stamps: Tensor | None = None,
    stamp_index: int = 0,
) -> None:
    """See the reference. D is a power of two."""
    batch, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    heads = query_heads + 2 * kv_heads
    assert staging.is_contiguous()
    assert staging.shape[2:] == (heads, head_dim)
    assert queries.stride(2) == keys.stride(2) == values.stride(2) == 1
    if stamps is not None and not stamps.is_cuda:
        reference.stamp(stamps, stamp_index)
        stamps = None
    block_heads = max(1, min(_BLOCK_ELEMENTS // head_dim, triton.next_power_of_2(heads)))
    # An empty batch still leaves its stamp.
    _pack[(max(1, batch), triton.cdiv(heads, block_heads))](
        staging,
        exchange_index,
        queries,
        keys,
        values,
        stamps,
        batch,
        layer_in_group,
        stamp_index,
        queries.stride(0),
        queries.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        layers=staging.shape[1],
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_heads=block_heads,
    )


def stamp(stamps: Tensor, index: int) -> None:
    """See the reference."""
    if stamps.is_cuda:
        assert stamps.is_contiguous()
        _stamp[(1,)](stamps, index, num_warps=1)
    else:
        reference.stamp(stamps, index)


@triton.jit(do_not_specialize=["index"], do_not_specialize_on_alignment=["stamps"])
def _stamp(stamps, index):
    tl.store(stamps + index, globaltimer())


@triton.jit(
    do_not_specialize=["batch", "layer_in_group", "stamp_index"],
    do_not_specialize_on_alignment=["exchange_index", "stamps"],
)
def _pack(
    staging,
    exchange_index,
    queries,
    keys,
    values,
    stamps,
    batch,
    layer_in_group,
    stamp_index,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    layers: tl.constexpr,
    query_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if stamps is not None:  # noqa: SIM102  (known when the kernel is compiled)
        if (row == 0) & (tl.program_id(1) == 0):
            tl.store(stamps + stamp_index, globaltimer())
    if row >= batch:
        return
    message_row = tl.load(exchange_index + row).to(tl.int64)
    if message_row < 0:
        return

    heads: tl.constexpr = query_heads + 2 * kv_heads
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    dims = tl.arange(0, head_dim)[None, :]
    is_query = head < query_heads
    is_value = head >= query_heads + kv_heads
    query = tl.load(
        queries + row * query_row_stride + head * query_head_stride + dims, mask=is_query
    )
    key = tl.load(
        keys + row * key_row_stride + (head - query_heads) * key_head_stride + dims,
        mask=(head >= query_heads) & (head < query_heads + kv_heads),
    )
    value = tl.load(
        values
        + row * value_row_stride
        + (head - query_heads - kv_heads) * value_head_stride
        + dims,
        mask=is_value & (head < heads),
    )
    packed = tl.where(is_query, query, tl.where(is_value, value, key))
    target = staging + ((message_row * layers + layer_in_group) * heads + head) * head_dim + dims
    tl.store(target, packed.to(staging.dtype.element_ty), mask=head < heads)
