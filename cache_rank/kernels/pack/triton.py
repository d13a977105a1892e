"""A layer's q, k and v are packed into the message to the cache rank, Triton.

The decode graph holds one launch a layer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from cache_rank.kernels.pack import reference

_BLOCK_ELEMENTS = 2048
"""A program moves at most this many elements."""


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
    assert staging[:1].is_contiguous()
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
        query_row_stride=queries.stride(0),
        query_head_stride=queries.stride(1),
        key_row_stride=keys.stride(0),
        key_head_stride=keys.stride(1),
        value_row_stride=values.stride(0),
        value_head_stride=values.stride(1),
        staging_row_stride=staging.stride(0),
        QUERY_HEADS=query_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
    )


def pack_hidden(
    staging: Tensor, exchange_index: Tensor, hidden: Tensor, residual: Tensor | None
) -> None:
    """See the reference."""
    batch, width = hidden.shape
    assert staging.stride(1) == hidden.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    if batch == 0:
        return
    _pack_hidden[(batch, triton.cdiv(width, _BLOCK_ELEMENTS))](
        staging,
        exchange_index,
        hidden,
        residual,
        staging.stride(0),
        hidden.stride(0),
        0 if residual is None else residual.stride(0),
        WIDTH=width,
        BLOCK=min(_BLOCK_ELEMENTS, triton.next_power_of_2(width)),
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
    staging_row_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One program writes BLOCK_HEADS heads of one row of the batch to the row's message.

    Heads are counted through the queries, the keys and the values. The first program also leaves
    the time.
    """
    # The time, and whether the row takes part.
    row = tl.program_id(0).to(tl.int64)
    if stamps is not None:  # noqa: SIM102  (known when the kernel is compiled)
        if (row == 0) & (tl.program_id(1) == 0):
            tl.store(stamps + stamp_index, globaltimer())
    if row >= batch:
        return
    message_row = tl.load(exchange_index + row).to(tl.int64)
    if message_row < 0:
        return

    # Each head is read from one of the three tensors.
    HEADS: tl.constexpr = QUERY_HEADS + 2 * KV_HEADS
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]  # [BLOCK_HEADS, 1]
    dims = tl.arange(0, HEAD_DIM)[None, :]  # [1, D]
    is_query = head < QUERY_HEADS
    is_value = head >= QUERY_HEADS + KV_HEADS
    query = tl.load(
        queries + row * query_row_stride + head * query_head_stride + dims, mask=is_query
    )
    key = tl.load(
        keys + row * key_row_stride + (head - QUERY_HEADS) * key_head_stride + dims,
        mask=(head >= QUERY_HEADS) & (head < QUERY_HEADS + KV_HEADS),
    )
    value = tl.load(
        values
        + row * value_row_stride
        + (head - QUERY_HEADS - KV_HEADS) * value_head_stride
        + dims,
        mask=is_value & (head < HEADS),
    )
    packed = tl.where(is_query, query, tl.where(is_value, value, key))  # [BLOCK_HEADS, D]
    in_row = (layer_in_group * HEADS + head) * HEAD_DIM + dims
    target = staging + message_row * staging_row_stride + in_row
    tl.store(target, packed.to(staging.dtype.element_ty), mask=head < HEADS)


@triton.jit(do_not_specialize_on_alignment=["exchange_index"])
def _pack_hidden(
    staging,
    exchange_index,
    hidden,
    residual,
    staging_row_stride,
    hidden_row_stride,
    residual_row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program writes BLOCK elements of one row of the batch to the row's message."""
    row = tl.program_id(0).to(tl.int64)
    message_row = tl.load(exchange_index + row).to(tl.int64)
    if message_row < 0:
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < WIDTH
    state = tl.load(hidden + row * hidden_row_stride + element, mask=inside).to(tl.float32)
    if residual is not None:
        state += tl.load(residual + row * residual_row_stride + element, mask=inside).to(tl.float32)
    target = staging + message_row * staging_row_stride + element
    tl.store(target, state.to(staging.dtype.element_ty), mask=inside)
