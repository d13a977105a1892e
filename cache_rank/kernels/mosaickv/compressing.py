"""Buffers of newest tokens are compressed, Triton: covariances, and packed vectors of a strategy.

The means of a buffer's keys over blocks of every size are rotated, 14 vectors beside 32, and those
of the strategy's own blocks are packed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.mosaickv.layout import Layout
from cache_rank.kernels.mosaickv.packing import pack_rows, rounded
from cache_rank.kernels.mosaickv.store import PackedStore

_MEANS = tl.constexpr(16)
"""A buffer has this many rows of means: 8 means of 4 keys, 4 of 8, 2 of 16, and 2 unused."""

_COVARIANCE_TILE = 64
"""A program multiplies this many channels with as many others."""


def add_covariance(
    store: PackedStore,
    slot: int,
    layers: range,
    first: int,
    last: int,
    before: Tensor,
    after: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two."""
    layout, (keys, values) = Layout.of(store), store.rings
    assert before.is_contiguous()
    assert after.is_contiguous()
    tile = min(_COVARIANCE_TILE, layout.head_dim)
    tiles = layout.head_dim // tile
    _covariance[(len(layers) * layout.kv_heads * 2, tiles, tiles)](
        keys,
        values,
        before,
        after,
        slot,
        layers.start,
        first,
        last,
        TILE=tile,
        LAYOUT=layout,
    )


def compress_buffers(
    store: PackedStore,
    pages: Tensor,
    slot: int,
    row: int,
    layers: range,
    first: int,
    last: int,
    losses: Tensor,
) -> None:
    """See the reference. Three launches, and scratch for 48 rotated vectors a buffer.

    What becomes of a buffer does not depend on which others come with it.
    """
    layout, buffers = Layout.of(store), (last - first) // store.buffer_tokens
    assert layout.buffer == 2 * _MEANS.value
    keys, values = store.rings
    units = len(layers) * layout.kv_heads
    vectors = (buffers, units, 2, layout.buffer + _MEANS.value, layout.columns)
    rotated = torch.empty(vectors, dtype=torch.float32, device=keys.device)
    lost = torch.empty((buffers, units, 2), dtype=torch.float64, device=keys.device)
    numbers = (slot, row, layers.start, first)
    _rotate[(units, 2, buffers)](
        keys,
        values,
        store.rotations,
        rotated,
        *numbers,
        LAYOUT=layout,
        EXACT=not keys.is_cuda or keys.dtype == torch.float32,
        num_warps=8,
    )
    _pack_buffer[(2 * buffers, units, 2)](
        keys,
        values,
        tuple(store.keys),
        tuple(store.values),
        tuple(store.block_keys),
        store.numbers,
        rotated,
        lost,
        pages,
        *numbers,
        limit=torch.finfo(keys.dtype).max,
        LAYOUT=layout,
        enable_fp_fusion=False,  # groups of the same energy as in the reference
    )
    _add_losses[(len(layers),)](
        lost,
        losses,
        layers.start,
        buffers,
        VECTORS=2 * layout.kv_heads,
        PADDED=triton.next_power_of_2(2 * layout.kv_heads),
        num_warps=1,
    )


@triton.jit
def _load_buffer(keys, values, part, slot, layer, head, first, LAYOUT: tl.constexpr):
    """Load the tokens of a buffer as they came: (buffer, D)."""
    unit = (slot.to(tl.int64) * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    token = unit * LAYOUT.ring + first % LAYOUT.ring + tl.arange(0, LAYOUT.buffer)
    at = token[:, None] * LAYOUT.head_dim + tl.arange(0, LAYOUT.head_dim)[None, :]
    return tl.load((keys if part == 0 else values) + at)


@triton.jit(do_not_specialize=["slot", "first_layer", "first", "last"])
def _covariance(
    keys,
    values,
    before,
    after,
    slot,
    first_layer,
    first,
    last,
    TILE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program adds tokens to a tile of one covariance, of keys or values of a kv head."""
    unit, part = tl.program_id(0) // 2, tl.program_id(0) % 2
    layer, head = first_layer + unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    index = tl.arange(0, TILE)
    row, column = tl.program_id(1) * TILE + index, tl.program_id(2) * TILE + index
    source = (slot.to(tl.int64) * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    ring = keys if part == 0 else values
    ring += source * LAYOUT.ring * LAYOUT.head_dim
    matrix = (layer.to(tl.int64) * 2 + part) * LAYOUT.kv_heads + head
    at = (matrix * LAYOUT.head_dim + row)[:, None] * LAYOUT.head_dim + column[None, :]
    # Not on the matrix unit: squares of what float32 holds may be beyond its range.
    total = tl.load(before + at)  # [TILE, TILE]
    for start in range(first, last, LAYOUT.buffer):
        tokens = ring + start % LAYOUT.ring * LAYOUT.head_dim
        product = tl.zeros((TILE, TILE), tl.float64)
        for token in range(LAYOUT.buffer):
            one = tl.load(tokens + token * LAYOUT.head_dim + row).to(tl.float64)
            other = tl.load(tokens + token * LAYOUT.head_dim + column).to(tl.float64)
            product += one[:, None] * other[None, :]
        total += product
    tl.store(after + at, total)


@triton.jit
def _first_mean(block, LAYOUT: tl.constexpr):
    """The index of the first mean over blocks of that size: means over smaller ones precede it."""
    return LAYOUT.buffer // 2 - 2 * LAYOUT.buffer // block


@triton.jit(do_not_specialize=["slot", "row", "first_layer", "first"])
def _rotate(
    keys,
    values,
    rotations,
    rotated,
    slot,
    row,
    first_layer,
    first,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program rotates a buffer's keys, or values, of one layer and kv head.

    It writes rows of COLUMNS float32: those of the tokens, and for keys those of the means too.
    """
    # The rotation: [D, COLUMNS]
    unit, part, buffer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, head = first_layer + unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    first += buffer * LAYOUT.buffer
    DTYPE: tl.constexpr = tl.float32 if EXACT else keys.dtype.element_ty
    dims, channel = tl.arange(0, LAYOUT.head_dim), tl.arange(0, LAYOUT.columns)
    matrix = ((row.to(tl.int64) * LAYOUT.layers + layer) * 2 + part) * LAYOUT.kv_heads + head
    at = (matrix * LAYOUT.head_dim + dims)[:, None] * LAYOUT.channels + channel[None, :]
    is_channel = (channel < LAYOUT.channels)[None, :]
    rotation = tl.load(rotations + at, mask=is_channel, other=0.0).to(DTYPE)

    # The tokens: [buffer, D]
    tokens = _load_buffer(keys, values, part, slot, layer, head, first, LAYOUT)
    product = tl.dot(tokens.to(DTYPE), rotation, input_precision="ieee")
    own = ((buffer.to(tl.int64) * tl.num_programs(0) + unit) * 2 + part) * (LAYOUT.buffer + _MEANS)
    target = rotated + own * LAYOUT.columns
    token = tl.arange(0, LAYOUT.buffer)
    tl.store(target + token[:, None] * LAYOUT.columns + channel[None, :], product)
    if part == 0:
        # The means, as a product with weights: [_MEANS, D]
        mean = tl.arange(0, _MEANS)
        block = tl.where(mean < _first_mean(16, LAYOUT), 8, 16)
        block = tl.where(mean < _first_mean(8, LAYOUT), 4, block)
        index = mean - _first_mean(block, LAYOUT)
        is_in_block = (token[None, :] // block[:, None] == index[:, None]).to(tl.float32)
        weight = is_in_block / block[:, None]
        means = tl.dot(weight, tokens.to(tl.float32), input_precision="ieee")
        means = rounded(means, keys.dtype.element_ty).to(DTYPE)
        of_means = tl.dot(means, rotation, input_precision="ieee")
        target += LAYOUT.buffer * LAYOUT.columns
        tl.store(target + mean[:, None] * LAYOUT.columns + channel[None, :], of_means)


@triton.jit(
    do_not_specialize=["slot", "row", "first_layer", "first", "limit"],
    do_not_specialize_on_alignment=["pages"],
)
def _pack_buffer(
    keys,
    values,
    packed_keys,
    packed_values,
    packed_blocks,
    numbers,
    rotated,
    lost,
    pages,
    slot,
    row,
    first_layer,
    first,
    limit,
    LAYOUT: tl.constexpr,
):
    """One program packs rows of `_rotate` into the pages: tokens, or means, of a buffer.

    They are the keys or the values of one layer and kv head. With the tokens it also writes what
    share of their energy they lose.
    """
    # The strategy, and where the buffer goes.
    is_means, unit, part = tl.program_id(0) % 2, tl.program_id(1), tl.program_id(2)
    own = (tl.program_id(0) // 2 * tl.num_programs(1) + unit).to(tl.int64) * 2 + part
    first += tl.program_id(0) // 2 * LAYOUT.buffer
    layer, head = first_layer + unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    of_strategy = numbers + (row.to(tl.int64) * LAYOUT.layers + layer) * 3
    kept, group = tl.load(of_strategy), tl.load(of_strategy + 1)
    block = tl.load(of_strategy + 2)
    width = (LAYOUT.channels // group + 7) // 8
    rows = own * (LAYOUT.buffer + _MEANS)
    page = tl.load(pages + first // LAYOUT.page).to(tl.int64)
    tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    in_page = first % LAYOUT.page
    BUFFER: tl.constexpr = LAYOUT.buffer
    index = tl.arange(0, BUFFER)
    if is_means == 0:
        entry = tile * LAYOUT.page + in_page + index
        if part == 0:
            elements, bitmap = packed_keys
        else:
            elements, bitmap = packed_values
        targets = (elements, bitmap, entry * LAYOUT.kept, entry * LAYOUT.bytes, width)
        stored = pack_rows(
            rotated,
            rows + index,
            tl.full((BUFFER,), True, tl.int1),
            targets,
            kept,
            group,
            limit,
            CHANNELS=LAYOUT.channels,
            STRIDE=LAYOUT.columns,
            COLUMNS=LAYOUT.columns,
        )  # [buffer, COLUMNS]
        # The share of energy that the tokens lose.
        tokens = _load_buffer(keys, values, part, slot, layer, head, first, LAYOUT).to(tl.float64)
        energy = tl.sum(tokens * tokens, axis=1)
        exact = stored.to(tl.float64)
        share = 1 - tl.sum(exact * exact, axis=1) / tl.where(energy == 0, 1, energy)
        share = tl.where(energy == 0, 0, tl.maximum(share, 0))
        tl.store(lost + own, tl.sum(share, axis=0))
    elif (part == 0) & (block > 1):
        entry = in_page + index * block
        entry = tile * LAYOUT.page_blocks + entry * LAYOUT.page_blocks // LAYOUT.page
        elements, bitmap = packed_blocks
        targets = (elements, bitmap, entry * LAYOUT.kept, entry * LAYOUT.bytes, width)
        pack_rows(
            rotated,
            rows + BUFFER + _first_mean(block, LAYOUT) + index,
            index < BUFFER // block,
            targets,
            kept,
            group,
            limit,
            CHANNELS=LAYOUT.channels,
            STRIDE=LAYOUT.columns,
            COLUMNS=LAYOUT.columns,
        )


@triton.jit(do_not_specialize=["first_layer", "buffers"])
def _add_losses(lost, losses, first_layer, buffers, VECTORS: tl.constexpr, PADDED: tl.constexpr):
    """One program adds the mean loss of a layer's VECTORS, of one buffer after another."""
    layer, index = tl.program_id(0), tl.arange(0, PADDED)
    total = tl.load(losses + first_layer + layer)
    for buffer in range(buffers):
        of_layer = lost + (buffer * tl.num_programs(0) + layer) * VECTORS
        shares = tl.load(of_layer + index, mask=index < VECTORS, other=0.0)
        total += tl.sum(shares, axis=0) / VECTORS
    tl.store(losses + first_layer + layer, total)
