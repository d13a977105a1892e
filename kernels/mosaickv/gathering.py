"""Gather of tokens for a message, decoded, Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from cache_rank_kernels.fp8.triton import convert
from cache_rank_kernels.mosaickv.layout import Layout
from cache_rank_kernels.mosaickv.packing import load_rows, rounded, tokens_in_pages
from cache_rank_kernels.mosaickv.store import PackedStore
from torch import Tensor

_ENTRIES = 16
"""Of a program: rows of a product."""


def gather_packed(
    store: PackedStore,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two."""
    rows, layers, kv_heads, capacity = entering.shape
    layout, (keys, values) = Layout.of(store), store.rings
    assert entering.is_contiguous()
    for out in (out_keys, out_values):
        assert out.is_contiguous()
        assert out.shape == (*entering.shape, layout.head_dim)
    _gather[(triton.cdiv(capacity, _ENTRIES), layers * kv_heads, rows * 2)](
        keys,
        values,
        tuple(store.keys),
        tuple(store.values),
        store.strategy_of,
        store.rows,
        store.numbers,
        store.rotations,
        page_table,
        slots,
        positions,
        entering,
        out_keys,
        out_values,
        first_layer,
        page_table.stride(0),
        store.strategy_of.shape[1],
        store.rows.shape[1],
        torch.finfo(keys.dtype).max,
        LAYERS=layers,
        CAPACITY=capacity,
        ENTRIES=_ENTRIES,
        LAYOUT=layout,
        EXACT=not keys.is_cuda or keys.dtype == torch.float32,
        num_warps=8,
    )


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "buffers", "strategies", "limit"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions", "entering"],
)
def _gather(
    keys,
    values,
    packed_keys,
    packed_values,
    strategy_of,
    rows,
    numbers,
    rotations,
    page_table,
    slots,
    positions,
    entering,
    out_keys,
    out_values,
    first_layer,
    page_stride,
    buffers,
    strategies,
    limit,
    LAYERS: tl.constexpr,
    CAPACITY: tl.constexpr,
    ENTRIES: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    row, part = (tl.program_id(2) // 2).to(tl.int64), tl.program_id(2) % 2
    unit = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    target = (row * LAYERS * LAYOUT.kv_heads + unit) * CAPACITY + entry
    position = tl.load(entering + target, mask=(entry < CAPACITY) & (slot >= 0), other=-1)
    used = position >= 0
    if tl.max(position) < 0:
        return
    layer, head = first_layer + unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    of_slot = strategy_of + slot * buffers
    packed = tokens_in_pages(of_slot, tl.load(positions + row) + 1, LAYOUT)
    is_packed = used & (position < packed)
    page_at = row * page_stride + position // LAYOUT.page
    page = tl.load(page_table + page_at, mask=is_packed, other=0).to(tl.int64)
    tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    token = tile * LAYOUT.page + position % LAYOUT.page
    strategy = tl.load(of_slot + position // LAYOUT.buffer, mask=is_packed, other=-1)

    dtype: tl.constexpr = tl.float32 if EXACT else keys.dtype.element_ty
    dims, channel = tl.arange(0, LAYOUT.head_dim), tl.arange(0, LAYOUT.columns)
    index = tl.arange(0, ENTRIES)
    ring_unit = (slot * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    in_ring = ring_unit * LAYOUT.ring + position % LAYOUT.ring
    in_ring = in_ring[:, None] * LAYOUT.head_dim + dims[None, :]
    is_newest = (used & ~is_packed)[:, None]
    if part == 0:
        newest = tl.load(keys + in_ring, mask=is_newest, other=0.0)
        elements, bitmap = packed_keys
        out = out_keys
    else:
        newest = tl.load(values + in_ring, mask=is_newest, other=0.0)
        elements, bitmap = packed_values
        out = out_values
    # A product with the rotation of each strategy, in which the other entries are 0.
    head_dim: tl.constexpr = LAYOUT.head_dim
    decoded = tl.zeros((ENTRIES, head_dim), tl.float32)
    for turn in range(ENTRIES):
        own = tl.sum(tl.where(index == turn, strategy, 0), axis=0)
        earlier = tl.sum(((strategy == own) & (index < turn)).to(tl.int32), axis=0)
        if (own >= 0) & (earlier == 0):
            table = tl.load(rows + slot * strategies + own).to(tl.int64)
            group = tl.load(numbers + (table * LAYOUT.layers + layer) * 3 + 1)
            vectors = load_rows(
                elements,
                bitmap,
                token,
                strategy == own,
                group,
                LAYOUT.kept,
                LAYOUT.bytes,
                LAYOUT.channels,
                LAYOUT.columns,
            ).to(dtype)
            matrix = ((table * LAYOUT.layers + layer) * 2 + part) * LAYOUT.kv_heads + head
            at = (matrix * LAYOUT.head_dim + dims)[None, :] * LAYOUT.channels + channel[:, None]
            is_channel = (channel < LAYOUT.channels)[:, None]
            rotation = tl.load(rotations + at, mask=is_channel, other=0.0).to(dtype)
            decoded = tl.dot(vectors, rotation, decoded, input_precision="ieee")
    decoded = rounded(tl.clamp(decoded, -limit, limit), newest.dtype)
    content = convert(tl.where(is_packed[:, None], decoded, newest), out.dtype.element_ty)
    tl.store(out + target[:, None] * LAYOUT.head_dim + dims[None, :], content, mask=used[:, None])
