"""What the kernels of formats that hold codes share, Triton.

A format's folder has three launches, `encode_groups`, `gather_codes` and `score_codes`, which the
reference here specifies. Its kernels are what is its own: how a group becomes codes, how codes
become tokens, and what the logits of a group are. Which group a program encodes, where its tokens
are, where gathered tokens go and how a query is multiplied with integers is here.

Channels are handled in two halves, as bytes of nibbles hold them: [0, D / 2) and [D / 2, D).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from cache_rank_kernels.coded.reference import CodedTokens
from cache_rank_kernels.fp8.triton import convert
from torch import Tensor

_GATHERED_ELEMENTS = 2048

_LEAST_COLUMNS = 8
"""Of a product on a matrix unit."""


def layout_constants(tokens: CodedTokens) -> dict[str, int]:
    """Sizes that address pages and rings; checks that both can be addressed."""
    _, layers, kv_heads, ring, head_dim = tokens.rings[0].shape
    assert all(ring.is_contiguous() for ring in tokens.rings)
    assert all(plane.is_contiguous() for planes in tokens.planes for plane in planes)
    return {
        "POOL_LAYERS": layers,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "RING": ring,
        "PAGE": tokens.page_tokens,
        "GROUP_TOKENS": tokens.group_tokens,
    }


def encode_grid(
    tokens: CodedTokens, slots: Tensor, count: int, layers: range, shipment: Tensor | None
) -> tuple[int, int, int]:
    """Programs that encode: groups of a row, keys and values of (layer, kv head), rows."""
    assert shipment is None or (shipment.is_contiguous() and slots.shape[0] == 1)
    most_groups = triton.cdiv(count, tokens.group_tokens)
    return most_groups, len(layers) * tokens.rings[0].shape[2] * 2, slots.shape[0]


def gather_arguments(
    entering: Tensor, *outs: Tensor
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Programs that gather, and the constants of how they share the entries."""
    rows, layers, kv_heads, capacity = entering.shape
    head_dim = outs[0].shape[-1]
    assert entering.is_contiguous()
    assert all(out.is_contiguous() and out.shape[:-1] == entering.shape for out in outs)
    block = max(1, min(_GATHERED_ELEMENTS // head_dim, triton.next_power_of_2(capacity)))
    grid = (triton.cdiv(capacity, block), layers * kv_heads, rows)
    return grid, {"LAYERS": layers, "CAPACITY": capacity, "BLOCK": block}


def digit_columns(queries: Tensor, out: Tensor, digits: int) -> int:
    """Columns of a query head: one a digit, and more of them 0 as the matrix unit needs them."""
    group = triton.next_power_of_2(queries.shape[2] // out.shape[2])
    return max(triton.next_power_of_2(digits), _LEAST_COLUMNS // group)


@triton.jit
def coded_tokens(resident, GROUP_TOKENS: tl.constexpr, RING: tl.constexpr):
    """How many of a sequence's tokens are held as codes."""
    full: tl.constexpr = RING // GROUP_TOKENS - 1
    return tl.maximum((resident // GROUP_TOKENS - full) * GROUP_TOKENS, 0)


@triton.jit
def group_to_encode(
    page_table,
    slots,
    starts,
    page_stride,
    resident,
    first_layer,
    count,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
):
    """Which group the program of an `encode_grid` encodes, if any; notes what is resident.

    Returns:
        Whether there is one; 0 for keys or 1 for values; the row's first new position; the group's
        first position; its index among the groups of (page, layer, kv head); and the index of
        (slot, layer, kv head) among those of the ring.
    """
    row = tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row)
    unit, part = tl.program_id(1) // 2, tl.program_id(1) % 2
    layer, head = first_layer + unit // KV_HEADS, unit % KV_HEADS
    first = coded_tokens(start, GROUP_TOKENS, RING) + tl.program_id(0) * GROUP_TOKENS
    exists = (slot >= 0) & (first < coded_tokens(start + count, GROUP_TOKENS, RING))
    if (slot >= 0) & (tl.program_id(0) == 0) & (head == 0) & (part == 0):
        tl.store(resident + slot * POOL_LAYERS + layer, start + count)
    page = tl.load(page_table + row * page_stride + first // PAGE, mask=exists, other=0)
    tile = (page.to(tl.int64) * POOL_LAYERS + layer) * KV_HEADS + head
    group = tile * (PAGE // GROUP_TOKENS) + first % PAGE // GROUP_TOKENS
    return exists, part, start, first, group, (slot * POOL_LAYERS + layer) * KV_HEADS + head


@triton.jit
def load_group(
    ring,
    shipment,
    part,
    start,
    first,
    ring_unit,
    count,
    dims,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RING: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
):
    """Channels `dims` of a group as they came, (GROUP_TOKENS, len(dims)) float32.

    From the shipment what it brings, if there is one, and from the ring what was there before.
    """
    position = first + tl.arange(0, GROUP_TOKENS)
    held = (ring_unit * RING + position % RING)[:, None] * HEAD_DIM + dims[None, :]
    if shipment is None:
        return tl.load(ring + held).to(tl.float32)
    else:
        is_new = (position >= start)[:, None]
        layer_and_head = ring_unit % (POOL_LAYERS * KV_HEADS)
        layer, head = layer_and_head // KV_HEADS, layer_and_head % KV_HEADS
        token = (part * POOL_LAYERS + layer) * count + position - start
        shipped = (token * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        old = tl.load(ring + held, mask=~is_new, other=0.0).to(tl.float32)
        # To the dtype of the ring and back, as if it had waited there.
        new = tl.load(shipment + shipped, mask=is_new, other=0.0).to(ring.dtype.element_ty)
        return tl.where(is_new, new.to(tl.float32), old)


@triton.jit
def note_not_finite(
    not_finite, is_finite, part, ring_unit, POOL_LAYERS: tl.constexpr, KV_HEADS: tl.constexpr
):
    """Leave word of a group that cannot be encoded; see `CodedTokens.not_finite`."""
    if tl.min(is_finite.to(tl.int32)) == 0:
        units: tl.constexpr = POOL_LAYERS * KV_HEADS
        tl.atomic_max(not_finite, (1 + part * units + ring_unit % units).to(tl.int32))


@triton.jit
def quotient(numerator, denominator):
    """The float32 quotient, and 0 where the denominator is 0: there all elements are the same."""
    return tl.where(denominator == 0.0, 0.0, tl.div_rn(numerator, denominator))


@triton.jit
def nearest_integers(numbers):
    """Float32 below 2^22 to the nearest integers, half to even."""
    return (numbers + 12582912.0) - 12582912.0


@triton.jit
def is_finite(numbers):
    """Of float32."""
    return tl.abs(numbers) < float("inf")


@triton.jit
def tokens_to_gather(
    page_table,
    slots,
    positions,
    entering,
    first_layer,
    page_stride,
    LAYERS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
):
    """The entries of a program of a `gather_arguments` grid.

    Returns:
        (BLOCK,) int64 index of each in the message; whether it is used; whether it is held as
        codes; its index among the tokens of pages, (pages, layers, Hkv, P); and among those of
        rings.
    """
    row, unit = tl.program_id(2).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    coded = coded_tokens(tl.load(positions + row) + 1, GROUP_TOKENS, RING)
    layer, head = first_layer + unit // KV_HEADS, unit % KV_HEADS
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = (row * LAYERS * KV_HEADS + unit) * CAPACITY + entry
    position = tl.load(entering + target, mask=(entry < CAPACITY) & (slot >= 0), other=-1)
    used = position >= 0
    is_coded = used & (position < coded)
    page = tl.load(page_table + row * page_stride + position // PAGE, mask=is_coded, other=0)
    tile = (page.to(tl.int64) * POOL_LAYERS + layer) * KV_HEADS + head
    ring_unit = (slot * POOL_LAYERS + layer) * KV_HEADS + head
    return target, used, is_coded, tile * PAGE + position % PAGE, ring_unit * RING + position % RING


@triton.jit
def store_gathered(
    out, decoded, ring, target, used, is_coded, in_ring, dims, largest, HEAD_DIM: tl.constexpr
):
    """Write channels `dims` of tokens to a message: as decoded, (BLOCK, len(dims)) float32, or as
    they came. What decodes beyond the dtype's range is its largest number."""
    source = in_ring[:, None] * HEAD_DIM + dims[None, :]
    newest = tl.load(ring + source, mask=(used & ~is_coded)[:, None], other=0.0)
    decoded = tl.clamp(decoded, -largest, largest).to(newest.dtype)
    content = convert(tl.where(is_coded[:, None], decoded, newest), out.dtype.element_ty)
    tl.store(out + target[:, None] * HEAD_DIM + dims[None, :], content, mask=used[:, None])


@triton.jit
def load_query_half(
    unit_queries, half, scale, GROUP: tl.constexpr, PADDED: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Half 0 or 1 of the channels of a unit's queries, times `scale`: (PADDED, D / 2) float32."""
    heads = tl.arange(0, PADDED)
    dims = half * (HEAD_DIM // 2) + tl.arange(0, HEAD_DIM // 2)
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    return tl.load(unit_queries + at, mask=(heads < GROUP)[:, None], other=0.0) * scale


@triton.jit
def power_below(numbers):
    """The largest power of two that is no larger: exact, and of 0 a tiny one."""
    bits = tl.maximum(numbers, 1e-30).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def query_digits(
    query,
    unit,
    DIGITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Float queries in 2 or 3 digits of 8 bits, for exact products with 8-bit integers.

    Rounded to a multiple of unit · 2^(3 - 8 DIGITS), so that no element is off by more than
    2^(2 - 8 DIGITS) of the largest.

    Args:
        query: (ROWS, HALF) float32, below 2 units.
        unit: (ROWS,) of `power_below`.

    Returns:
        (ROWS * COLUMNS, HALF) int8: of a row its digits, the most significant first, and zeros.
    """
    # The bits of 1.5 · 2^23 + an integer are those of 1.5 · 2^23, 0x4B400000, + the integer.
    fixed = query * (_digit_range(DIGITS) / unit)[:, None] + 12582912.0
    bias: tl.constexpr = 0x8080 if DIGITS == 2 else 0x808080  # 128 in each digit
    biased = fixed.to(tl.int32, bitcast=True) + (bias - 0x4B400000)
    column = tl.arange(0, COLUMNS)[None, :, None]
    byte = (biased[:, None, :] >> 8 * tl.maximum(DIGITS - 1 - column, 0)) & 255
    digit = tl.where(column < DIGITS, byte - 128, 0).to(tl.int8)
    return tl.reshape(digit, (ROWS * COLUMNS, HALF))


@triton.jit
def sum_of_digits(
    products,
    DIGITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Products with float queries, in their units, from those with the digits.

    Args:
        products: (TOKENS, PADDED * COLUMNS) int32, each below 2^24.

    Returns:
        (TOKENS, PADDED) float32.
    """
    digit = tl.arange(0, PADDED * COLUMNS) % COLUMNS
    weight = tl.exp2(8.0 * (DIGITS - 1 - digit)) / _digit_range(DIGITS)
    weighted = tl.reshape(products.to(tl.float32) * weight[None, :], (TOKENS, PADDED, COLUMNS))
    return tl.sum(weighted, axis=2)


@triton.jit
def _digit_range(DIGITS: tl.constexpr):
    """What `query_digits` makes of a unit: twice that, and the bias, fit the digits."""
    return 8192.0 if DIGITS == 2 else 2097152.0
