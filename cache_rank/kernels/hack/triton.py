"""HACK codes, Triton: the functions of the format; `Format` says what each of them does.

Scores are products of codes with codes, as integers of 8 bits: those of keys, and those of queries
less 128, which the sums of the keys' codes make up for.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.coded.format import Format, Parameters
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.rounding import is_finite, nearest_integers, quotient
from cache_rank.kernels.coded.tokens import load_group, place_in_pages, store_gathered
from cache_rank.kernels.hack.attending import attend, attending
from cache_rank.kernels.hack.queries import Constants, logits_on_codes, query_operands
from cache_rank.kernels.hack.reference import HackCodec
from cache_rank.kernels.score.triton import store_logits

_PRODUCTS = 4096
"""Registers hold this many products of a block of keys with the columns of queries."""


class _Encoding(NamedTuple):
    """What `_encode` and `_gather` are compiled for.

    Attributes:
        bits: the bits of a code.
        partition: the elements of a partition; those of keys have at most D.
        width: the bytes of a token's codes.
        seed: the seed of stochastic rounding; None rounds to the nearest.
    """

    bits: int
    partition: int
    width: int
    seed: int | None


def _encoding(tokens: CodedTokens) -> Parameters:
    codec, head_dim = tokens.codecs[0], tokens.rings[0].shape[-1]
    assert isinstance(codec, HackCodec)
    width = head_dim * codec.bits // 8
    return Parameters((), _Encoding(codec.bits, codec.partition, width, codec.seed))


def _scoring(
    tokens: CodedTokens,
    queries: Tensor,
    out: Tensor,
) -> Parameters:
    codec = tokens.codecs[0]
    assert isinstance(codec, HackCodec)
    group = triton.next_power_of_2(queries.shape[2] // out.shape[2])
    constants = Constants.of(codec, queries.shape[-1], group)
    block = min(_PRODUCTS // constants.columns, tokens.page_tokens)
    return Parameters((), constants._replace(block=block))


@triton.jit
def _mixed(state):
    """Scramble uint32 as the reference does."""
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
    minima,
    scales,
    AXIS: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Compute the codes of partitions along an axis, and write what they are relative to.

    Args:
        exact: three-dimensional float32.
        place: the place of each element in its partition, broadcast along the axis.
        at: where in the planes each partition has its entry; of size 1 along the axis.
        minima, scales: the planes that are written.

    Returns:
        Codes, int32 like `exact`, and whether each stored scale is finite.
    """
    MOST: tl.constexpr = (1 << CONSTANTS.bits) - 1
    minimum = tl.min(exact, axis=AXIS, keep_dims=True) + 0.0
    largest = tl.max(exact, axis=AXIS, keep_dims=True)
    stored = tl.div_rn(largest - minimum, MOST * 1.0).to(scales.dtype.element_ty)
    scale = stored.to(tl.float32)
    offset = quotient(exact - minimum, scale)
    if CONSTANTS.seed is None:
        rounded = nearest_integers(offset)
    else:
        rounded = tl.floor(offset + _uniform(place, minimum, scale, exact, CONSTANTS.seed))
    codes = tl.clamp(rounded, 0.0, MOST * 1.0).to(tl.int32)
    tl.store(minima + at, minimum.to(minima.dtype.element_ty))
    tl.store(scales + at, stored)
    return codes, is_finite(scale)


@triton.jit
def _encode(
    planes,
    group,
    source,
    tables,
    OF_KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Encode one group; see `Format`.

    Partitions of keys are of channels, and those of values of tokens.
    """
    exact = load_group(source, tl.arange(0, LAYOUT.head_dim), LAYOUT)  # [group tokens, D]
    minima, scales = planes[1], planes[2]
    TOKENS: tl.constexpr = LAYOUT.group_tokens
    token = group * TOKENS + tl.arange(0, TOKENS)
    if OF_KEYS:
        SIZE: tl.constexpr = min(CONSTANTS.partition, LAYOUT.head_dim)
        COUNT: tl.constexpr = LAYOUT.head_dim // SIZE
        parts = tl.reshape(exact, (TOKENS, COUNT, SIZE))  # [group tokens, Z, Π]
        place = tl.arange(0, SIZE)[None, None, :]
        at = (token[:, None] * COUNT + tl.arange(0, COUNT)[None, :])[:, :, None]
        found, finite = _encode_partitions(parts, place, at, minima, scales, 2, CONSTANTS)
        sums = planes[3]
        tl.store(sums + at, tl.sum(found, axis=2, keep_dims=True).to(sums.dtype.element_ty))
    else:
        STRETCHES: tl.constexpr = TOKENS // CONSTANTS.partition
        parts = tl.reshape(exact, (STRETCHES, CONSTANTS.partition, LAYOUT.head_dim))  # [Z, Π, D]
        place = tl.arange(0, CONSTANTS.partition)[None, :, None]
        entry = group * STRETCHES + tl.arange(0, STRETCHES)
        channel = tl.arange(0, LAYOUT.head_dim)[None, None, :]
        at = entry[:, None, None] * LAYOUT.head_dim + channel
        found, finite = _encode_partitions(parts, place, at, minima, scales, 1, CONSTANTS)
        if len(planes) == 4:
            sums = planes[3]
            tl.store(sums + at, tl.sum(found, axis=1, keep_dims=True).to(sums.dtype.element_ty))
    # Codes that are `width` channels apart share a byte.
    PER_BYTE: tl.constexpr = 8 // CONSTANTS.bits
    shifted = tl.reshape(found, (TOKENS, PER_BYTE, CONSTANTS.width))
    shifted = shifted << (CONSTANTS.bits * tl.arange(0, PER_BYTE))[None, :, None]
    packed = tl.sum(shifted, axis=1).to(tl.uint8)
    tl.store(
        planes[0] + token[:, None] * CONSTANTS.width + tl.arange(0, CONSTANTS.width)[None, :],
        packed,
    )
    return tl.minimum(tl.min(is_finite(exact).to(tl.int32)), tl.min(finite.to(tl.int32)))


@triton.jit
def _decode_channels(
    packed,
    planes,
    token,
    mask,
    INDEX: tl.constexpr,
    OF_KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Decode channels [INDEX · width, (INDEX + 1) · width) of tokens: (n, width) float32.

    Args:
        packed: (n, width) codes.
        token: (n,) indices among the tokens of pages, (pages, layers, Hkv, P).
        mask: (n, width) which are wanted.
    """
    minima, scales = planes[1], planes[2]
    channel = INDEX * CONSTANTS.width + tl.arange(0, CONSTANTS.width)
    if OF_KEYS:
        PARTITION: tl.constexpr = min(CONSTANTS.partition, LAYOUT.head_dim)
        COUNT: tl.constexpr = LAYOUT.head_dim // PARTITION
        at = token[:, None] * COUNT + (channel // PARTITION)[None, :]
    else:
        at = (token // CONSTANTS.partition)[:, None] * LAYOUT.head_dim + channel[None, :]
    minimum = tl.load(minima + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    code = (packed >> (INDEX * CONSTANTS.bits)) & ((1 << CONSTANTS.bits) - 1)
    return minimum + scale * code.to(tl.float32)


@triton.jit
def _gather(
    planes,
    token,
    target,
    tables,
    OF_KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Decode gathered tokens, and store them; see `Format`."""
    WIDTH: tl.constexpr = CONSTANTS.width
    byte = tl.arange(0, WIDTH)
    mask = target.is_coded[:, None] & (byte < WIDTH)[None, :]
    packed = tl.load(planes[0] + token[:, None] * WIDTH + byte[None, :], mask=mask, other=0)
    for index in tl.static_range(8 // CONSTANTS.bits):
        decoded = _decode_channels(packed, planes, token, mask, index, OF_KEYS, LAYOUT, CONSTANTS)
        store_gathered(target, decoded, index * WIDTH, LAYOUT)


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
    CONSTANTS: tl.constexpr,
):
    """Compute the logits of the keys [start, coded_stop) of a unit; see `Format`."""
    query = query_operands(queries, scale, GROUP, PADDED, LAYOUT.head_dim, CONSTANTS)
    PARTITIONS: tl.constexpr = LAYOUT.head_dim // CONSTANTS.partition
    WIDTH: tl.constexpr = CONSTANTS.width
    token, byte = tl.arange(0, CONSTANTS.block), tl.arange(0, CONSTANTS.bytes)[None, :]
    for first in tl.range(start, coded_stop, CONSTANTS.block, num_stages=STAGES):
        tile = place_in_pages(pages, first, layer, head, LAYOUT)
        # Keys that a page has beyond the last token are read too, and their logits not written.
        at = tile * WIDTH + (token[:, None] * WIDTH + byte)
        packed = tl.load(planes[0] + at, mask=byte < WIDTH, other=0)
        logit = logits_on_codes(
            packed, planes, tile, query, PADDED, PARTITIONS, INTERPRETED, CONSTANTS
        )
        store_logits(logit, first + token, first + token < coded_stop, logits, PADDED)


FORMAT = Format(_encode, _gather, _logits, _encoding, _scoring, attend=attend, attending=attending)
