"""HACK codes on a GPU, Triton; coded/triton.py says what each function here does.

Scores multiply codes with codes, as integers of 8 bits: those of keys, and those of queries less
128, which the sums of the keys' codes make up for.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import triton
import triton.language as tl
from cache_rank_kernels.coded import triton as coded
from cache_rank_kernels.coded.format import Format, Own
from cache_rank_kernels.coded.parts import (
    is_finite,
    load_group,
    nearest_integers,
    quotient,
    store_gathered,
)
from cache_rank_kernels.coded.reference import CodedTokens
from cache_rank_kernels.hack.queries import query_operands
from cache_rank_kernels.hack.reference import HackCodec
from cache_rank_kernels.nibbles.triton import high_nibbles, low_nibbles
from cache_rank_kernels.score.triton import store_logits
from torch import Tensor

_PRODUCTS = 4096
"""Of a block of keys with the columns of queries: what registers hold."""

_DECODED_BLOCK = 64


class _Encoding(NamedTuple):
    """What codes are compiled for.

    Attributes:
        bits: of a code.
        partition: elements of a partition, of keys at most D.
        width: bytes of a token.
        seed: of stochastic rounding; None rounds to the nearest.
    """

    bits: int
    partition: int
    width: int
    seed: int | None


class _Scoring(NamedTuple):
    """What scores are compiled for.

    Attributes:
        bits, partition, width: of keys, see `_Encoding`.
        columns: of queries.
        bytes: of a token that are read, some of them for nothing.
        block: tokens that are multiplied at once.
        decodes: multiply decoded keys.
    """

    bits: int
    partition: int
    width: int
    columns: int
    bytes: int
    block: int
    decodes: bool


def _encoding(tokens: CodedTokens) -> Own:
    codec, head_dim = tokens.codecs[0], tokens.rings[0].shape[-1]
    assert isinstance(codec, HackCodec)
    width = head_dim * codec.bits // 8
    return Own((), _Encoding(codec.bits, codec.partition, width, codec.seed))


def _scoring(
    tokens: CodedTokens,
    queries: Tensor,
    out: Tensor,
    exact: bool,
    products: int = _PRODUCTS,
    columns: int = 8,
) -> Own:
    """Keys are multiplied with at least `columns` columns of queries, `products` at once."""
    codec, head_dim = tokens.codecs[0], queries.shape[-1]
    assert isinstance(codec, HackCodec)
    partition = min(codec.partition, head_dim)
    group = triton.next_power_of_2(queries.shape[2] // out.shape[2])
    columns = max(columns, group * (1 if exact else head_dim // partition))
    width = head_dim * codec.bits // 8
    constants = _Scoring(
        codec.bits,
        partition,
        width,
        columns,
        max(32, width),  # the matrix unit takes no fewer
        _DECODED_BLOCK if exact else min(products // columns, tokens.page_tokens),
        exact,
    )
    return Own((), constants)


@triton.jit
def _mixed(state):
    """uint32, scrambled as by the reference."""
    for _ in tl.static_range(2):
        state = ((state >> 16) ^ state) * 0x45D9F3B
    return (state >> 16) ^ state


@triton.jit
def _uniform(place, minimum, scale, exact, SEED: tl.constexpr):
    """Numbers in [0, 1), one an element; see the reference."""
    state = _mixed(place.to(tl.uint32) + tl.full((1, 1, 1), SEED * 0x10001, tl.uint32))
    state = _mixed(state ^ minimum.to(tl.uint32, bitcast=True))
    state = _mixed(state ^ scale.to(tl.uint32, bitcast=True))
    state = _mixed(state ^ exact.to(tl.uint32, bitcast=True))
    return (state >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def _encode_partitions(
    exact,
    place,
    at,
    planes,
    AXIS: tl.constexpr,
    OWN: tl.constexpr,
):
    """Codes of partitions along an axis; writes what they are relative to.

    Args:
        exact: three-dimensional float32.
        place: of each element in its partition, broadcast along the axis.
        at: where in the planes each partition has its entry; of size 1 along the axis.

    Returns:
        Codes, int32 like `exact`, and whether each stored scale is finite.
    """
    _, minima, scales, sums = planes
    most: tl.constexpr = (1 << OWN.bits) - 1
    minimum = tl.min(exact, axis=AXIS, keep_dims=True) + 0.0
    largest = tl.max(exact, axis=AXIS, keep_dims=True)
    stored = tl.div_rn(largest - minimum, most * 1.0).to(scales.dtype.element_ty)
    scale = stored.to(tl.float32)
    offset = quotient(exact - minimum, scale)
    if OWN.seed is None:
        rounded = nearest_integers(offset)
    else:
        rounded = tl.floor(offset + _uniform(place, minimum, scale, exact, OWN.seed))
    codes = tl.clamp(rounded, 0.0, most * 1.0).to(tl.int32)
    tl.store(minima + at, minimum.to(minima.dtype.element_ty))
    tl.store(scales + at, stored)
    tl.store(sums + at, tl.sum(codes, axis=AXIS, keep_dims=True).to(sums.dtype.element_ty))
    return codes, is_finite(scale)


@triton.jit
def _encode(
    planes,
    group,
    source,
    tables,
    OF_KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OWN: tl.constexpr,
):
    """See `Format`. Partitions are of channels for keys, and of tokens for values."""
    exact = load_group(source, tl.arange(0, LAYOUT.head_dim), LAYOUT)
    tokens: tl.constexpr = LAYOUT.group_tokens
    token = group * tokens + tl.arange(0, tokens)
    if OF_KEYS:
        size: tl.constexpr = min(OWN.partition, LAYOUT.head_dim)
        count: tl.constexpr = LAYOUT.head_dim // size
        parts = tl.reshape(exact, (tokens, count, size))
        place = tl.arange(0, size)[None, None, :]
        at = (token[:, None] * count + tl.arange(0, count)[None, :])[:, :, None]
        found, finite = _encode_partitions(parts, place, at, planes, 2, OWN)
    else:
        stretches: tl.constexpr = tokens // OWN.partition
        parts = tl.reshape(exact, (stretches, OWN.partition, LAYOUT.head_dim))
        place = tl.arange(0, OWN.partition)[None, :, None]
        entry = group * stretches + tl.arange(0, stretches)
        channel = tl.arange(0, LAYOUT.head_dim)[None, None, :]
        at = entry[:, None, None] * LAYOUT.head_dim + channel
        found, finite = _encode_partitions(parts, place, at, planes, 1, OWN)
    per_byte: tl.constexpr = 8 // OWN.bits
    shifted = tl.reshape(found, (tokens, per_byte, OWN.width))
    shifted = shifted << (OWN.bits * tl.arange(0, per_byte))[None, :, None]
    packed = tl.sum(shifted, axis=1).to(tl.uint8)
    tl.store(planes[0] + token[:, None] * OWN.width + tl.arange(0, OWN.width)[None, :], packed)
    return tl.minimum(tl.min(is_finite(exact).to(tl.int32)), tl.min(finite.to(tl.int32)))


@triton.jit
def _decode_channels(
    packed,
    planes,
    token,
    mask,
    INDEX: tl.constexpr,
    OF_KEYS: tl.constexpr,
    BYTES: tl.constexpr,
    LAYOUT: tl.constexpr,
    OWN: tl.constexpr,
):
    """Channels [INDEX · width, (INDEX + 1) · width) of tokens: (n, BYTES) float32.

    Args:
        packed: (n, BYTES) of which the width of a token is used.
        token: (n,) index among those of pages, (pages, layers, Hkv, P).
        mask: (n, BYTES) which are wanted.
    """
    _, minima, scales, _ = planes
    channel = INDEX * OWN.width + tl.arange(0, BYTES)
    if OF_KEYS:
        partition: tl.constexpr = min(OWN.partition, LAYOUT.head_dim)
        count: tl.constexpr = LAYOUT.head_dim // partition
        at = token[:, None] * count + (channel // partition)[None, :]
    else:
        at = (token // OWN.partition)[:, None] * LAYOUT.head_dim + channel[None, :]
    minimum = tl.load(minima + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    code = (packed >> (INDEX * OWN.bits)) & ((1 << OWN.bits) - 1)
    return minimum + scale * code.to(tl.float32)


@triton.jit
def _gather(
    planes,
    token,
    is_coded,
    message,
    tables,
    OF_KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OWN: tl.constexpr,
):
    """See `Format`."""
    width: tl.constexpr = OWN.width
    byte = tl.arange(0, width)
    mask = is_coded[:, None] & (byte < width)[None, :]
    packed = tl.load(planes[0] + token[:, None] * width + byte[None, :], mask=mask, other=0)
    for index in tl.static_range(8 // OWN.bits):
        decoded = _decode_channels(packed, planes, token, mask, index, OF_KEYS, width, LAYOUT, OWN)
        store_gathered(message, decoded, index * width + byte, LAYOUT)


@triton.jit
def _codes(packed, INDEX: tl.constexpr, BITS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Code INDEX of each byte: int8 of the same shape; four of them an instruction on a GPU."""
    if INTERPRETED:
        return ((packed >> (INDEX * BITS)) & ((1 << BITS) - 1)).to(tl.int8)
    elif BITS == 4:
        return low_nibbles(packed, False) if INDEX == 0 else high_nibbles(packed, False)
    elif INDEX == 0:
        return _asm("and.b32 $0, $1, 0x03030303;", packed)
    elif INDEX == 1:
        return _asm("{ .reg .b32 t; shr.b32 t, $1, 2; and.b32 $0, t, 0x03030303; }", packed)
    elif INDEX == 2:
        return _asm("{ .reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x03030303; }", packed)
    else:
        return _asm("{ .reg .b32 t; shr.b32 t, $1, 6; and.b32 $0, t, 0x03030303; }", packed)


@triton.jit
def _asm(INSTRUCTIONS: tl.constexpr, packed):
    return tl.inline_asm_elementwise(
        INSTRUCTIONS, "=r,r", [packed], dtype=tl.int8, is_pure=True, pack=4
    )


@triton.jit
def _logits_on_codes(
    packed,
    planes,
    tile,
    query,
    PADDED: tl.constexpr,
    PARTITIONS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    OWN: tl.constexpr,
):
    """Logits of a block of keys by products of codes with codes: (block, PADDED) float32."""
    _, minima, scales, sums = planes
    operands, of_sum, of_minimum, of_all = query
    block: tl.constexpr = OWN.block
    columns: tl.constexpr = OWN.columns
    product = tl.zeros((block, columns), tl.int32)
    for index in tl.static_range(8 // OWN.bits):
        code = _codes(packed, index, OWN.bits, INTERPRETED)
        product = tl.dot(code, operands[index], product, out_dtype=tl.int32)
    count: tl.constexpr = columns // PADDED
    product = tl.reshape(product.to(tl.float32), (block, PADDED, count))
    partition = tl.arange(0, count)[None, :]
    at = tile * PARTITIONS + (tl.arange(0, block)[:, None] * PARTITIONS + partition)
    there = partition < PARTITIONS
    key_minimum = tl.load(minima + at, mask=there, other=0.0).to(tl.float32)[:, None, :]
    key_scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)[:, None, :]
    key_sum = tl.load(sums + at, mask=there, other=0).to(tl.float32)[:, None, :]
    term = key_scale * (product + of_sum * key_sum) + key_minimum * of_minimum
    return tl.sum(term * of_all, axis=2)


@triton.jit
def _logits_of_decoded(
    packed,
    planes,
    tile,
    queries,
    scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    LAYOUT: tl.constexpr,
    OWN: tl.constexpr,
):
    """The same by decoded keys and queries as they are, in float32: slow, for measurements."""
    block: tl.constexpr = OWN.block
    columns: tl.constexpr = OWN.columns
    token = tile + tl.arange(0, block)
    byte, head = tl.arange(0, OWN.bytes), tl.arange(0, columns)[None, :]
    used = (byte < OWN.width)[:, None] & (head < GROUP)
    product = tl.zeros((block, columns), tl.float32)
    for index in tl.static_range(8 // OWN.bits):
        key = _decode_channels(
            packed,
            planes,
            token,
            (byte < OWN.width)[None, :],
            index,
            True,
            OWN.bytes,
            LAYOUT,
            OWN,
        )
        at = head * LAYOUT.head_dim + (index * OWN.width + byte)[:, None]
        query = tl.load(queries + at, mask=used, other=0.0) * scale
        product = tl.dot(key, query, product, input_precision="ieee")
    # Columns beyond the heads are 0.
    return tl.sum(tl.reshape(product, (block, columns // PADDED, PADDED)), axis=1)


@triton.jit
def _logits(
    planes,
    queries,
    pages,
    layer,
    head,
    start,
    coded_stop,
    scale,
    logits,
    tables,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    LAYOUT: tl.constexpr,
    OWN: tl.constexpr,
):
    """See `Format`."""
    if not OWN.decodes:
        query = query_operands(queries, scale, GROUP, PADDED, LAYOUT.head_dim, OWN)
    partitions: tl.constexpr = LAYOUT.head_dim // OWN.partition
    width: tl.constexpr = OWN.width
    token, byte = tl.arange(0, OWN.block), tl.arange(0, OWN.bytes)[None, :]
    for first in tl.range(start, coded_stop, OWN.block, num_stages=STAGES):
        page = tl.load(pages + first // LAYOUT.page).to(tl.int64)
        tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
        tile = tile * LAYOUT.page + first % LAYOUT.page
        # What a page holds beyond the last token is read too, and not written.
        at = tile * width + (token[:, None] * width + byte)
        packed = tl.load(planes[0] + at, mask=byte < width, other=0)
        if OWN.decodes:
            logit = _logits_of_decoded(
                packed, planes, tile, queries, scale, GROUP, PADDED, LAYOUT, OWN
            )
        else:
            logit = _logits_on_codes(
                packed, planes, tile, query, PADDED, partitions, INTERPRETED, OWN
            )
        store_logits(logit, first + token, first + token < coded_stop, logits, PADDED)


FORMAT = Format(_encode, _gather, _logits, _encoding, _scoring)

encode_groups = partial(coded.encode_groups, FORMAT)
gather_codes = partial(coded.gather_codes, FORMAT)
score_codes = partial(coded.score_codes, FORMAT)
