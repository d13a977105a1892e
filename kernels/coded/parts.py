"""What kernels of formats that hold codes are made of, Triton.

Where the tokens of a group are, where gathered tokens go, and how a query is multiplied with
integers. Channels are often handled in two halves, as bytes of nibbles hold them: [0, D / 2) and
[D / 2, D).
"""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.fp8.triton import convert
from torch import Tensor

_LEAST_COLUMNS = 8
"""Of a product on a matrix unit."""


def digit_columns(queries: Tensor, out: Tensor, digits: int) -> int:
    """Columns of a query head: one a digit, and more of them 0 as the matrix unit needs them."""
    group = triton.next_power_of_2(queries.shape[2] // out.shape[2])
    return max(triton.next_power_of_2(digits), _LEAST_COLUMNS // group)


@triton.jit
def load_group(source, dims, LAYOUT: tl.constexpr):
    """Channels `dims` of a group as they came, (group tokens, len(dims)) float32.

    From the shipment what it brings, if there is one, and from the ring what was there before.

    Args:
        source: ring, shipment or None, 0 for keys or 1 for values, the row's first new position,
            the group's first position, the index of (slot, layer, kv head) among those of the ring,
            and new tokens of the row.
        dims: of the channels.
        LAYOUT: see `Layout`.
    """
    ring, shipment, part, start, first, ring_unit, count = source
    position = first + tl.arange(0, LAYOUT.group_tokens)
    held = ring_unit * LAYOUT.ring + position % LAYOUT.ring
    held = held[:, None] * LAYOUT.head_dim + dims[None, :]
    if shipment is None:
        return tl.load(ring + held).to(tl.float32)
    else:
        is_new = (position >= start)[:, None]
        layer_and_head = ring_unit % (LAYOUT.layers * LAYOUT.kv_heads)
        layer, head = layer_and_head // LAYOUT.kv_heads, layer_and_head % LAYOUT.kv_heads
        token = (part * LAYOUT.layers + layer) * count + position - start
        shipped = (token * LAYOUT.kv_heads + head)[:, None] * LAYOUT.head_dim + dims[None, :]
        old = tl.load(ring + held, mask=~is_new, other=0.0).to(tl.float32)
        # To the dtype of the ring and back, as if it had waited there.
        new = tl.load(shipment + shipped, mask=is_new, other=0.0).to(ring.dtype.element_ty)
        return tl.where(is_new, new.to(tl.float32), old)


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
def store_gathered(message, decoded, dims, LAYOUT: tl.constexpr):
    """Write channels `dims` of tokens to a message: as decoded, or as they came.

    What decodes beyond the dtype's range is its largest number.

    Args:
        message: the ring, the message, and of each token (BLOCK,) its index in the message, whether
            it is used, whether it is held as codes and its index among those of rings; and the
            largest number of the ring's dtype.
        decoded: (BLOCK, len(dims)) float32.
        dims: of the channels.
        LAYOUT: see `Layout`.
    """
    ring, out, target, used, is_coded, in_ring, largest = message
    source = in_ring[:, None] * LAYOUT.head_dim + dims[None, :]
    newest = tl.load(ring + source, mask=(used & ~is_coded)[:, None], other=0.0)
    decoded = tl.clamp(decoded, -largest, largest).to(newest.dtype)
    content = convert(tl.where(is_coded[:, None], decoded, newest), out.dtype.element_ty)
    tl.store(out + target[:, None] * LAYOUT.head_dim + dims[None, :], content, mask=used[:, None])


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
