"""Tokens that enter a working set are read and decoded, Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.mosaickv.compressing import rounded
from cache_rank.kernels.mosaickv.packed import (
    Layout,
    in_words,
    no_word,
    tokens_in_pages,
    unpack_part,
)
from cache_rank.kernels.mosaickv.reference import PackedStore
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score.triton import multiplies_float32
from cache_rank.kernels.wire.reference import wire_width
from cache_rank.kernels.wire.triton import store_tokens

_ENTRIES = 32
"""A program gathers this many tokens: rows of a product, for which a rotation is read once."""

_REGISTERS = 128
"""A thread has this many, so that four programs, which wait for memory, share a multiprocessor."""


def gather_packed(
    store: PackedStore,
    rows: PagedRows,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two."""
    count, layers, kv_heads, capacity = entering.shape
    layout, (keys, values) = Layout.of(store), store.rings
    assert entering.is_contiguous()
    for out in (out_keys, out_values):
        assert out.is_contiguous()
        assert out.shape == (*entering.shape, wire_width(layout.head_dim, out.dtype))
    _gather[(triton.cdiv(capacity, _ENTRIES), layers * kv_heads, count * 2)](
        keys,
        values,
        in_words(store.keys),
        in_words(store.values),
        store.strategy_of,
        store.rows,
        store.numbers,
        store.rotations,
        *rows,
        entering,
        out_keys,
        out_values,
        first_layer=first_layer,
        page_stride=rows.page_table.stride(0),
        buffers=store.strategy_of.shape[1],
        strategies=store.rows.shape[1],
        limit=torch.finfo(keys.dtype).max,
        LAYERS=layers,
        CAPACITY=capacity,
        ENTRIES=_ENTRIES,
        LAYOUT=layout,
        EXACT=multiplies_float32(keys),
        maxnreg=_REGISTERS,
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
    """One program reads keys, or values, of ENTRIES tokens of one row, layer and kv head."""
    # Which tokens.
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
    # Where each is, and with which strategy it was packed.
    of_slot = strategy_of + slot * buffers
    packed = tokens_in_pages(of_slot, tl.load(positions + row) + 1, LAYOUT)
    is_packed = used & (position < packed)
    page_at = row * page_stride + position // LAYOUT.page
    page = tl.load(page_table + page_at, mask=is_packed, other=0).to(tl.int64)
    tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    token = tile * LAYOUT.page + position % LAYOUT.page
    strategy = tl.load(of_slot + position // LAYOUT.buffer, mask=is_packed, other=-1)

    # Tokens that are not packed yet, from the ring: [ENTRIES, D]
    DTYPE: tl.constexpr = tl.float32 if EXACT else keys.dtype.element_ty
    dims, channel = tl.arange(0, LAYOUT.head_dim), tl.arange(0, LAYOUT.part)
    ring_unit = (slot * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    in_ring = ring_unit * LAYOUT.ring + position % LAYOUT.ring
    in_ring = in_ring[:, None] * LAYOUT.head_dim + dims[None, :]
    is_newest = (used & ~is_packed)[:, None]
    if part == 0:
        newest = tl.load(keys + in_ring, mask=is_newest, other=0.0)
        vectors = packed_keys
        out = out_keys
    else:
        newest = tl.load(values + in_ring, mask=is_newest, other=0.0)
        vectors = packed_values
        out = out_values
    # Packed tokens: a product with the rotation of each strategy, in which other tokens are 0.
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    CHANNEL_PARTS: tl.constexpr = LAYOUT.parts
    decoded = tl.zeros((ENTRIES, HEAD_DIM), tl.float32)
    own = tl.max(strategy)
    while own >= 0:
        table = tl.load(rows + slot * strategies + own).to(tl.int64)
        group = tl.load(numbers + (table * LAYOUT.layers + layer) * 2 + 1)
        matrix = ((table * LAYOUT.layers + layer) * 2 + part) * LAYOUT.kv_heads + head
        rotation = rotations + matrix * LAYOUT.head_dim * LAYOUT.channels
        word, before = no_word(token)
        for index in tl.static_range(CHANNEL_PARTS):
            content, word, before = unpack_part(
                vectors, token, strategy == own, word, before, index, group, LAYOUT
            )
            of_part = index * LAYOUT.part + channel[:, None]
            at = dims[None, :] * LAYOUT.channels + of_part
            # [part, D]
            columns = tl.load(rotation + at, mask=of_part < LAYOUT.channels, other=0.0)
            decoded = tl.dot(content.to(DTYPE), columns.to(DTYPE), decoded, input_precision="ieee")
        own = tl.max(tl.where(strategy < own, strategy, -1))
    decoded = rounded(tl.clamp(decoded, -limit, limit), newest.dtype)
    content = tl.where(is_packed[:, None], decoded, newest)
    store_tokens(out, target, content, used, LAYOUT.head_dim)
