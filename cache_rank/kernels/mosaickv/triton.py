"""Buffers of newest tokens are rotated and packed, and tokens decoded, Triton.

Rate and element group are numbers that kernels load, not constants that they are compiled for: the
first segment that has a strategy must not wait for a compiler.

The place of an element in a packed vector is how many elements are kept before it. This count is a
product with a triangular matrix of ones on the matrix unit, which is exact in float16, because
Triton 3.6 miscompiles prefix sums of two dimensions in some layouts. `packed` counts bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.coded.tokens import place_in_pages
from cache_rank.kernels.mosaickv.attending import attend_packed
from cache_rank.kernels.mosaickv.packed import Layout, in_words, tokens_in_pages, unpack_part
from cache_rank.kernels.mosaickv.reference import PackedStore
from cache_rank.kernels.mosaickv.scoring import score_packed_step
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score.triton import multiplies_float32
from cache_rank.kernels.wire.reference import wire_width
from cache_rank.kernels.wire.triton import store_tokens

__all__ = ["attend_packed", "compress_buffers", "gather_packed", "score_packed_step"]

_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
"""The smallest float32 that is not subnormal."""

_ENTRIES = 32
"""A program gathers this many tokens: rows of a product, for which a rotation is read once."""

_REGISTERS = 128
"""A thread has this many, so that four programs, which wait for memory, share a multiprocessor."""


def compress_buffers(
    store: PackedStore,
    pages: Tensor,
    slot: int,
    row: int,
    layers: range,
    first: int,
    last: int,
    losses: Tensor | None = None,
) -> None:
    """See the reference. One launch; D is a power of two."""
    layout, (keys, values) = Layout.of(store), store.rings
    assert losses is None or losses.is_contiguous()
    units = len(layers) * layout.kv_heads
    _compress[((last - first) // store.buffer_tokens, units, 2)](
        keys,
        values,
        tuple(store.keys),
        tuple(store.values),
        store.numbers,
        store.rotations,
        losses,
        pages,
        slot,
        row,
        layers.start,
        first,
        limit=torch.finfo(keys.dtype).max,
        LAYOUT=layout,
        EXACT=multiplies_float32(keys),
        enable_fp_fusion=False,  # groups of the same energy as in the reference
    )


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
        (keys, in_words(store.keys), out_keys),
        (values, in_words(store.values), out_values),
        (store.strategy_of, store.rows, store.numbers, store.rotations),
        *rows,
        entering,
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


@triton.jit
def rounded(numbers, DTYPE: tl.constexpr):
    """Round finite float32 to another dtype; the interpreter's own cuts off bits of bfloat16."""
    if DTYPE == tl.bfloat16:
        bits = numbers.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        numbers = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return numbers.to(DTYPE)


@triton.jit
def _set_before(bits):
    """Count the ones before each entry of a row, (vectors, COLUMNS) of 0 and 1: int32."""
    index = tl.arange(0, bits.shape[1])
    ones = (index[:, None] < index[None, :]).to(tl.float16)
    return tl.dot(bits.to(tl.float16), ones).to(tl.int32)


@triton.jit
def _group_energy(numbers, group):
    """The energy of each number's group, the squares of which are added in order."""
    COUNT: tl.constexpr = numbers.shape[0]
    FOURS: tl.constexpr = numbers.shape[1] // 4
    squares = numbers * numbers
    even, odd = tl.split(tl.reshape(squares, (COUNT, FOURS, 2, 2)))
    of_two = even + odd  # [COUNT, FOURS, 2]
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    of_four = (first + second + third + fourth)[:, :, None, None]
    of_two = tl.broadcast_to(of_two[:, :, :, None], (COUNT, FOURS, 2, 2))
    of_four = tl.broadcast_to(of_four, (COUNT, FOURS, 2, 2))
    energy = tl.reshape(tl.where(group == 2, of_two, of_four), squares.shape)
    return tl.where(group == 1, squares, energy)


@triton.jit
def _of_most_energy(energy, used, kept):
    """Choose `kept` elements of most energy in each vector; ties go to the first ones.

    The elements of a group all have its energy, and so are chosen together. The bound that `kept`
    elements reach is found a bit at a time: numbers that are not negative are in the order of their
    bits.

    Returns:
        (vectors, COLUMNS) int32, 1 where an element is chosen, else 0.
    """
    key = tl.where(used, energy.to(tl.int32, bitcast=True), -1)
    bound = tl.zeros((energy.shape[0],), tl.int32)
    for turn in range(31):
        higher = bound | (1 << (30 - turn))
        reached = tl.sum((key >= higher[:, None]).to(tl.int32), axis=1)
        bound = tl.where(reached >= kept, higher, bound)
    above = (key > bound[:, None]).to(tl.int32)
    tied = (key == bound[:, None]).to(tl.int32)
    missing = kept - tl.sum(above, axis=1)
    return above + tied * (_set_before(tied) < missing[:, None]).to(tl.int32)


@triton.jit(
    do_not_specialize=["slot", "row", "first_layer", "first", "limit"],
    do_not_specialize_on_alignment=["pages"],
)
def _compress(
    keys,
    values,
    packed_keys,
    packed_values,
    numbers,
    rotations,
    losses,
    pages,
    slot,
    row,
    first_layer,
    first,
    limit,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program compresses a buffer's keys, or values, of one layer and kv head."""
    buffer, unit, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, head = first_layer + unit // LAYOUT.kv_heads, unit % LAYOUT.kv_heads
    first += buffer * LAYOUT.buffer
    BUFFER: tl.constexpr = LAYOUT.buffer
    index, dims = tl.arange(0, BUFFER), tl.arange(0, LAYOUT.head_dim)
    channel = tl.arange(0, LAYOUT.columns)
    used = (channel < LAYOUT.channels)[None, :]
    # The strategy: the rotation is [D, COLUMNS].
    table = row.to(tl.int64) * LAYOUT.layers + layer
    kept, group = tl.load(numbers + table * 2), tl.load(numbers + table * 2 + 1)
    matrix = (table * 2 + part) * LAYOUT.kv_heads + head
    at = (matrix * LAYOUT.head_dim + dims)[:, None] * LAYOUT.channels + channel[None, :]
    rotation = tl.load(rotations + at, mask=used, other=0.0)
    # The tokens, [BUFFER, D], and their rotated vectors, [BUFFER, COLUMNS].
    in_ring = (slot.to(tl.int64) * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
    token = in_ring * LAYOUT.ring + first % LAYOUT.ring + index
    at = token[:, None] * LAYOUT.head_dim + dims[None, :]
    tokens = tl.load((keys if part == 0 else values) + at)
    DTYPE: tl.constexpr = tl.float32 if EXACT else keys.dtype.element_ty
    rotated = tl.dot(tokens.to(DTYPE), rotation.to(DTYPE), input_precision="ieee")
    # The same bits as `pack_vectors` of the reference.
    largest = tl.max(tl.abs(rotated), axis=1)
    largest = tl.where(largest >= _SMALLEST_NORMAL, largest, 1.0)
    energy = _group_energy(tl.div_rn(rotated, largest[:, None]), group)
    bits = _of_most_energy(energy, used, kept)
    # The chosen elements, in the order of their channels.
    if part == 0:
        elements, bitmap = packed_keys
    else:
        elements, bitmap = packed_values
    entry = place_in_pages(pages, first, layer, head, LAYOUT) + index
    chosen, place = bits > 0, _set_before(bits)
    stored = rounded(tl.clamp(rotated, -limit, limit), elements.dtype.element_ty)
    # No more than r are stored, even if a vector is not finite and so has no order.
    at = (entry * LAYOUT.kept)[:, None] + place
    tl.store(elements + at, stored, mask=chosen & (place < kept))
    # The bitmap, a byte at a time.
    of_group = channel // group
    is_first = (channel % group == 0)[None, :]
    width = (LAYOUT.channels // group + 7) // 8
    for byte in tl.static_range((LAYOUT.channels + 7) // 8):
        in_byte = is_first & (of_group // 8 == byte)[None, :]
        packed = tl.sum(tl.where(in_byte, bits << (of_group % 8)[None, :], 0), axis=1)
        tl.store(bitmap + entry * LAYOUT.words * 4 + byte, packed.to(tl.uint8), byte < width)
    # The share of energy that the tokens lose.
    if losses is not None:
        exact = tokens.to(tl.float64)
        energy = tl.sum(exact * exact, axis=1)
        exact = tl.where(chosen, stored.to(tl.float64), 0.0)
        share = 1 - tl.sum(exact * exact, axis=1) / tl.where(energy == 0, 1, energy)
        share = tl.where(energy == 0, 0, tl.maximum(share, 0))
        lost = ((buffer * LAYOUT.layers + layer) * 2 + part) * LAYOUT.kv_heads + head
        tl.store(losses + lost, tl.sum(share, axis=0))


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "buffers", "strategies", "limit"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions", "entering"],
)
def _gather(
    of_keys,
    of_values,
    tables,
    page_table,
    slots,
    positions,
    entering,
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
    keys, packed_keys, out_keys = of_keys
    values, packed_values, out_values = of_values
    strategy_of, rows, numbers, rotations = tables
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
    pages = page_table + row * page_stride
    token = place_in_pages(pages, position, layer, head, LAYOUT, is_packed)
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
        none = tl.zeros(token.shape, tl.uint32)
        word, before = none, none
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
