"""Attention over QuantSpec codes where they lie (QuantSpec appendices E and J), Triton.

Keys have a scale for each channel of a group, and values one for each token. So neither is decoded:
queries are multiplied with the scales of keys, once a group, and weights with those of values. What
codes are relative to adds one number to each:

    q·k = Σ (q S) code + Σ q Z          Σ p v = Σ (p S) code + Σ p Z

Codes are whole numbers of float16, and the factors before them are rounded to it. A word of 16 bits
has codes of four channels. Codes of one place in two words are unpacked at once, as they lie in the
operands of the matrix unit. So sums are taken by `parts_of_words`.

That is for the queries of a token. For those of several, as a verification has, `attend_many` makes
queries the rows of products, and decodes keys and values, so that each is decoded once for all.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cache_rank.kernels.coded.format import Launch, Parameters
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.rounding import power_below
from cache_rank.kernels.coded.tokens import place_ahead, place_in_pages
from cache_rank.kernels.nibbles.triton import (
    both_nibbles_as_half,
    channels_of_joined,
    code_as_half,
    decode_as_half,
    join_parts,
    parts_of_words,
    split_parts,
)
from cache_rank.kernels.quantspec.reference import QuantSpecCodec

_HEADROOM = tl.constexpr(14.0)
"""The largest weight is 2 to this power: smaller ones then stay in the range of float16."""

_VALUE_UNIT = tl.constexpr(2.0**-12)
"""The unit of a group, of its largest value: small values are normal numbers of float16 then."""

_LEAST_VALUE = tl.constexpr(2.0**-60)
"""No largest value counts as smaller, so that sums of weights stay in the range of float32."""

_LEAST_STEP = tl.constexpr(2.0**-100)
"""No step of values counts as smaller, so that sums of weights stay in the range of float32."""


class _Attending(NamedTuple):
    """What both functions are compiled for: how many bits of keys and values are read, 4 or 8."""

    bits: int


def attending(tokens: CodedTokens, padded: int) -> Parameters:
    """See `Format`."""
    codec = tokens.codecs[0]
    assert isinstance(codec, QuantSpecCodec)
    assert not tokens.unfinished
    assert tokens.codecs[1] == codec._replace(per_channel=False)
    launch = Launch(warps=2, programs=4 if codec.read_bits == 8 else 6)
    if padded > 8:
        # So two programs of 64 queries fit the shared memory of a multiprocessor.
        stages = 3 if codec.dtype.itemsize == 2 else 2
        launch = Launch(warps=4 if padded <= 64 else 8, stages=stages)
    return Parameters((), _Attending(codec.read_bits), launch)


@triton.jit
def _load_codes(planes, at, BITS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Load the parts of the codes of words, float16, above what they are by OFFSET of `attend`."""
    uppers = tl.load(planes[0].to(tl.pointer_type(tl.uint16)) + at)
    if BITS == 8:
        lowers = tl.load(planes[1].to(tl.pointer_type(tl.uint16)) + at)
        return [both_nibbles_as_half(uppers, lowers, i, INTERPRETED) for i in (0, 1, 2, 3)]
    else:
        return [code_as_half(uppers, i, 4, INTERPRETED) for i in (0, 1, 2, 3)]


@triton.jit
def _decode(
    planes,
    at,
    steps,
    zeros,
    BITS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Decode the words of tokens: (TOKENS, D) float16, by `channels_of_joined`."""
    OFFSET: tl.constexpr = 1032.0 if BITS == 8 else 64.0
    codes = _load_codes(planes, at, BITS, INTERPRETED)
    parts = [
        decode_as_half(codes[i], steps[i], zeros[i], OFFSET, INTERPRETED) for i in (0, 1, 2, 3)
    ]
    return join_parts(parts, TOKENS, WORDS)


@triton.jit
def _load_relative_to(planes, at, BITS: tl.constexpr):
    """Load what codes are relative to, float32: a step of them, and what a code of 0 stands for."""
    scale = tl.load(planes[2] + at).to(tl.float32)
    zero = tl.load(planes[3] + at).to(tl.float32)
    return scale * (0.0625 if BITS == 8 else 1.0), zero


@triton.jit
def _load_of_channels(plane, first, FACTOR: tl.constexpr, WORDS: tl.constexpr):
    """Load numbers of channels, times a factor: `parts_of_words`, (1, WORDS) float16.

    Two of 2 bytes are a word of 4, which is copied ahead.
    """
    DTYPE: tl.constexpr = plane.dtype.element_ty
    if DTYPE.primitive_bitwidth == 32:
        numbers = tl.load(plane + first + tl.arange(0, 4 * WORDS)[None, :])
        parts = parts_of_words(numbers, 1, 4)
    else:
        at = plane.to(tl.pointer_type(tl.uint32)) + first // 2 + tl.arange(0, WORDS)[None, :]
        pairs = [tl.load(at), tl.load(at + WORDS)]
        parts = [(pairs[i // 2] >> i % 2 * 16).to(tl.uint16) for i in (0, 1, 2, 3)]
    return [
        (parts[i].to(DTYPE, bitcast=True).to(tl.float32) * FACTOR).to(tl.float16)
        for i in (0, 1, 2, 3)
    ]


@triton.jit
def attend(
    key_planes,
    value_planes,
    queries,
    pages,
    layer,
    head,
    start,
    stop,
    scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Attend to the tokens [start, stop), group after group; see `Format`."""
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    WORDS: tl.constexpr = HEAD_DIM // 4
    SIZE: tl.constexpr = LAYOUT.group_tokens
    BITS: tl.constexpr = CONSTANTS.bits
    OFFSET: tl.constexpr = 1032.0 if BITS == 8 else 64.0
    dims, row = tl.arange(0, HEAD_DIM), tl.arange(0, PADDED)[:, None]
    query = tl.load(queries + row * HEAD_DIM + dims[None, :], mask=row < GROUP, other=0.0) * scale
    word, token = tl.arange(0, WORDS), tl.arange(0, SIZE)
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    sums = [tl.zeros((WORDS, PADDED), tl.float32) for _ in (0, 1, 2, 3)]
    for first in tl.range(start, stop, SIZE, num_stages=STAGES):
        group = place_in_pages(pages, first, layer, head, LAYOUT) // SIZE
        words = group * SIZE * WORDS
        # Queries times steps, float16 in a unit of each query, and what is added to its logits.
        step, zero = _load_relative_to(key_planes, group * HEAD_DIM + dims, BITS)
        factor = query * step[None, :]
        unit = power_below(tl.max(tl.abs(factor), axis=1))
        factor = (factor / unit[:, None]).to(tl.float16)
        offset = (OFFSET * unit)[:, None] * factor.to(tl.float32)
        added = tl.sum(query * zero[None, :] - offset, axis=1)
        # [group tokens, D / 4] codes, and [group tokens, PADDED] logits
        codes = _load_codes(
            key_planes,
            words + token[:, None] * WORDS + word[None, :],
            BITS,
            INTERPRETED,
        )
        factors = parts_of_words(factor, PADDED, 4)
        logits = tl.dot(codes[0], tl.trans(factors[0]))
        for i in tl.static_range(1, 4):
            logits = tl.dot(codes[i], tl.trans(factors[i]), logits)
        logits = logits * unit[None, :] + added[None, :]
        # Weights, so scaled that weights times steps are below 2, and fit float16 whatever steps.
        step, zero = _load_relative_to(value_planes, group * SIZE + token, BITS)
        bits = tl.maximum(step, _LEAST_STEP).to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) - 127).to(tl.float32)
        of_block = tl.max(logits + exponent[:, None], axis=0)
        before, largest = largest, tl.maximum(largest, of_block)
        weights = tl.exp2(logits - largest[None, :])
        factor = (weights * step[:, None]).to(tl.float16)
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=0)
        added = tl.sum(weights * zero[:, None] - OFFSET * factor.to(tl.float32), axis=0)
        added = tl.broadcast_to(added[None, :], (WORDS, PADDED))
        # [D / 4, group tokens]
        codes = _load_codes(
            value_planes,
            words + token[None, :] * WORDS + word[:, None],
            BITS,
            INTERPRETED,
        )
        # The matrix unit cuts off what does not fit its sums, OFFSET among them. Over many groups
        # that would add up, so each has its own.
        sums = [sums[i] * decay[None, :] + tl.dot(codes[i], factor, added) for i in (0, 1, 2, 3)]
    return sums, largest, total


@triton.jit
def attend_many(
    key_planes,
    value_planes,
    queries,
    pages,
    layer,
    head,
    start,
    stop,
    scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """As `attend`, for more queries: codes become numbers once, for queries in all warps.

    They go to shared memory, float16 and with their scales, where the matrix unit reads them.
    """
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    WORDS: tl.constexpr = HEAD_DIM // 4
    SIZE: tl.constexpr = LAYOUT.group_tokens
    BITS: tl.constexpr = CONSTANTS.bits
    FACTOR: tl.constexpr = 0.0625 if BITS == 8 else 1.0
    row, word, token = tl.arange(0, PADDED)[:, None], tl.arange(0, WORDS), tl.arange(0, SIZE)
    at = token[:, None] * WORDS + word[None, :]
    own = queries + row * HEAD_DIM + channels_of_joined(WORDS)[None, :]
    query = (tl.load(own, mask=row < GROUP, other=0.0) * scale).to(tl.float16)
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    sums = tl.zeros((PADDED, HEAD_DIM), tl.float32)
    last_group, place = tl.maximum(stop - SIZE, 0), tl.zeros((), tl.int64)
    if start < stop:
        place = place_ahead(pages, start, layer, head, INTERPRETED, LAYOUT)
    next_step = tl.load(value_planes[2] + place + token)
    next_zero = tl.load(value_planes[3] + place + token)
    for first in tl.range(start, stop, SIZE, num_stages=STAGES):
        place = place_ahead(pages, tl.minimum(first, last_group), layer, head, INTERPRETED, LAYOUT)
        # Numbers of 2 bytes are not copied ahead: those of values are loaded an iteration early.
        step, zero = next_step.to(tl.float32) * FACTOR, next_zero.to(tl.float32)
        following = tl.minimum(first + SIZE, last_group)
        following = place_ahead(pages, following, layer, head, INTERPRETED, LAYOUT)
        next_step = tl.load(value_planes[2] + following + token)
        next_zero = tl.load(value_planes[3] + following + token)
        last = zero + step * (256.0 if BITS == 8 else 16.0)
        most = tl.maximum(tl.max(tl.maximum(tl.abs(zero), tl.abs(last))), _LEAST_VALUE)
        unit = power_below(most) * _VALUE_UNIT
        exponent, inverse = tl.log2(unit), 1.0 / unit
        value_steps = [(step * inverse).to(tl.float16)[:, None] for _ in (0, 1, 2, 3)]
        value_zeros = [(zero * inverse).to(tl.float16)[:, None] for _ in (0, 1, 2, 3)]
        channels, words = place // SIZE * HEAD_DIM, place * WORDS
        steps = _load_of_channels(key_planes[2], channels, FACTOR, WORDS)
        zeros = _load_of_channels(key_planes[3], channels, 1.0, WORDS)
        keys = _decode(key_planes, words + at, steps, zeros, BITS, SIZE, WORDS, INTERPRETED)
        logits = tl.dot(query, tl.trans(keys))
        # Values are in a unit, so weights are times the unit.
        of_block = tl.max(logits, axis=1) + (exponent - _HEADROOM)
        before, largest = largest, tl.maximum(largest, of_block)
        weights = tl.exp2(logits - (largest - exponent)[:, None])
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=1) * inverse
        values = _decode(
            value_planes, words + at, value_steps, value_zeros, BITS, SIZE, WORDS, INTERPRETED
        )
        sums = tl.dot(weights.to(tl.float16), values, sums * decay[:, None])
    parts = split_parts(sums, PADDED, WORDS)
    return [tl.trans(parts[i]) for i in (0, 1, 2, 3)], largest, total
