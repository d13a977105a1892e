"""Buffers of newest tokens: their covariances, and packed vectors of a strategy, Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.mosaickv.layout import Layout
from cache_rank.kernels.mosaickv.packing import pack_rows
from cache_rank.kernels.mosaickv.store import PackedStore

_COVARIANCE_TILE = 64
"""A program multiplies this many channels with as many others."""


def add_covariance(
    store: PackedStore,
    slot: int,
    layers: range,
    first: int,
    last: int,
    covariance: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two."""
    layout, (keys, values) = Layout.of(store), store.rings
    assert covariance.is_contiguous()
    tile = min(_COVARIANCE_TILE, layout.head_dim)
    tiles = layout.head_dim // tile
    _covariance[(len(layers) * layout.kv_heads * 2, tiles, tiles)](
        keys,
        values,
        covariance,
        covariance,
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
    """See the reference. Three launches, and scratch for the rotated vectors of a buffer.

    What becomes of a buffer does not depend on which others come with it.
    """
    layout, buffers = Layout.of(store), (last - first) // store.buffer_tokens
    keys, values = store.rings
    units = len(layers) * layout.kv_heads
    vectors = (buffers, units, 2, layout.buffer, layout.columns)
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
    _pack_buffer[(buffers, units, 2)](
        keys,
        values,
        tuple(store.keys),
        tuple(store.values),
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

    It writes a row of COLUMNS float32 for each token.
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
    own = ((buffer.to(tl.int64) * tl.num_programs(0) + unit) * 2 + part) * LAYOUT.buffer
    target = rotated + own * LAYOUT.columns
    token = tl.arange(0, LAYOUT.buffer)
    tl.store(target + token[:, None] * LAYOUT.columns + channel[None, :], product)


@triton.jit(
    do_not_specialize=["slot", "row", "first_layer", "first", "limit"],
    do_not_specialize_on_alignment=["pages"],
)
def _pack_buffer(
    keys,
    values,
    packed_keys,
    packed_values,
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
    """One program packs a buffer's rows of `_rotate` into the pages.

    They are the keys or the values of one layer and kv head. It also writes what share of their
    energy they lose.
    """
    # The strategy, and where the buffer goes.
    buffer, unit, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = (buffer * tl.num_programs(1) + unit).to(tl.int64) * 2 + part
    first += buffer * LAYOUT.buffer
    layer, head = first_layer + unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    of_strategy = numbers + (row.to(tl.int64) * LAYOUT.layers + layer) * 2
    kept, group = tl.load(of_strategy), tl.load(of_strategy + 1)
    width = (LAYOUT.channels // group + 7) // 8
    page = tl.load(pages + first // LAYOUT.page).to(tl.int64)
    tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    BUFFER: tl.constexpr = LAYOUT.buffer
    index = tl.arange(0, BUFFER)
    entry = tile * LAYOUT.page + first % LAYOUT.page + index
    if part == 0:
        elements, bitmap = packed_keys
    else:
        elements, bitmap = packed_values
    targets = (elements, bitmap, entry * LAYOUT.kept, entry * LAYOUT.bytes, width)
    stored = pack_rows(
        rotated,
        own * BUFFER + index,
        targets,
        kept,
        group,
        limit,
        CHANNELS=LAYOUT.channels,
        COLUMNS=LAYOUT.columns,
    )  # [buffer, COLUMNS]
    # The share of energy that the tokens lose.
    tokens = _load_buffer(keys, values, part, slot, layer, head, first, LAYOUT).to(tl.float64)
    energy = tl.sum(tokens * tokens, axis=1)
    exact = stored.to(tl.float64)
    share = 1 - tl.sum(exact * exact, axis=1) / tl.where(energy == 0, 1, energy)
    share = tl.where(energy == 0, 0, tl.maximum(share, 0))
    tl.store(lost + own, tl.sum(share, axis=0))


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
