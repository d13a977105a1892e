"""Attention over QuantSpec codes where they lie (QuantSpec appendices E and J), Triton.

Keys have a scale for each channel of a group, and values one for each token. So neither is decoded:
queries are multiplied with the scales of keys, once a group, and weights with those of values. What
codes are relative to adds one number to each:

    q·k = Σ (q S) code + Σ q Z          Σ p v = Σ (p S) code + Σ p Z

Codes are whole numbers of float16, and the factors before them are rounded to it. A word of 16 bits
has codes of four channels. Codes of one place in two words are unpacked at once, as they lie in the
operands of the matrix unit. So sums are taken over quarters of the channels: quarter i has those of
the low or high half, for even or odd i, that are even or odd, for i below 2 or not.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cache_rank.kernels.coded.format import Launch, Parameters
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.rounding import power_below
from cache_rank.kernels.nibbles.triton import both_nibbles_as_half, code_as_half
from cache_rank.kernels.quantspec.reference import QuantSpecCodec

_LEAST_STEP = tl.constexpr(2.0**-100)
"""No step of values counts as smaller, so that sums of weights stay in the range of float32."""


class _Attending(NamedTuple):
    """What `attend` is compiled for: how many bits of keys and of values are read, 4 or 8."""

    key_bits: int
    value_bits: int


def attending(tokens: CodedTokens, padded: int) -> Parameters:
    """See `Format`."""
    keys, values = tokens.codecs
    assert isinstance(keys, QuantSpecCodec)
    assert isinstance(values, QuantSpecCodec)
    constants = _Attending(keys.read_bits, values.read_bits)
    if padded > 8:
        return Parameters((), constants, Launch(warps=4 if padded <= 32 else 8))
    both = 8 in constants
    return Parameters((), constants, Launch(warps=2, programs=4 if both else 6))


@triton.jit
def _load_codes(planes, at, BITS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Load the codes of words: those of the four quarters of the channels, float16 each.

    They are above what they stand for by the constant that `code_as_half` adds, or the other.
    """
    uppers = tl.load(planes[0].to(tl.pointer_type(tl.uint16)) + at)
    if BITS == 8:
        lowers = tl.load(planes[1].to(tl.pointer_type(tl.uint16)) + at)
        return [both_nibbles_as_half(uppers, lowers, i, INTERPRETED) for i in (0, 1, 2, 3)]
    else:
        return [code_as_half(uppers, i, 4, INTERPRETED) for i in (0, 1, 2, 3)]


@triton.jit
def _load_relative_to(planes, at, BITS: tl.constexpr):
    """Load what codes are relative to, float32: a step of them, and what a code of 0 stands for."""
    scale = tl.load(planes[2] + at).to(tl.float32)
    zero = tl.load(planes[3] + at).to(tl.float32)
    return scale * (0.0625 if BITS == 8 else 1.0), zero


@triton.jit
def _quarters(factor, PADDED: tl.constexpr, QUARTER: tl.constexpr):
    """The quarters of the channels of (PADDED, D): (D / 4, PADDED) each."""
    even, odd = tl.split(tl.reshape(factor, (PADDED, 2, QUARTER, 2)))
    even_low, even_high = tl.split(tl.permute(even, (2, 0, 1)))
    odd_low, odd_high = tl.split(tl.permute(odd, (2, 0, 1)))
    return even_low, even_high, odd_low, odd_high


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
    QUARTER: tl.constexpr = HEAD_DIM // 4
    SIZE: tl.constexpr = LAYOUT.group_tokens
    KEY_OFFSET: tl.constexpr = 1032.0 if CONSTANTS.key_bits == 8 else 64.0
    VALUE_OFFSET: tl.constexpr = 1032.0 if CONSTANTS.value_bits == 8 else 64.0
    dims, row = tl.arange(0, HEAD_DIM), tl.arange(0, PADDED)[:, None]
    query = tl.load(queries + row * HEAD_DIM + dims[None, :], mask=row < GROUP, other=0.0) * scale
    word, token = tl.arange(0, QUARTER), tl.arange(0, SIZE)
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    rest = tl.zeros((PADDED,), tl.float32)
    sums = [tl.zeros((QUARTER, PADDED), tl.float32) for _ in (0, 1, 2, 3)]
    for first in tl.range(start, stop, SIZE, num_stages=STAGES):
        page = tl.load(pages + first // LAYOUT.page).to(tl.int64)
        tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
        group = tile * (LAYOUT.page // SIZE) + first % LAYOUT.page // SIZE
        words = group * SIZE * QUARTER
        # Queries times steps, float16 in a unit of each query, and what is added to its logits.
        step, zero = _load_relative_to(key_planes, group * HEAD_DIM + dims, CONSTANTS.key_bits)
        factor = query * step[None, :]
        unit = power_below(tl.max(tl.abs(factor), axis=1))
        factor = (factor / unit[:, None]).to(tl.float16)
        offset = (KEY_OFFSET * unit)[:, None] * factor.to(tl.float32)
        added = tl.sum(query * zero[None, :] - offset, axis=1)
        # [group tokens, D / 4] codes, and [group tokens, PADDED] logits
        codes = _load_codes(
            key_planes,
            words + token[:, None] * QUARTER + word[None, :],
            CONSTANTS.key_bits,
            INTERPRETED,
        )
        factors = _quarters(factor, PADDED, QUARTER)
        logits = tl.dot(codes[0], factors[0])
        logits = tl.dot(codes[1], factors[1], logits)
        logits = tl.dot(codes[2], factors[2], logits)
        logits = tl.dot(codes[3], factors[3], logits)
        logits = logits * unit[None, :] + added[None, :]
        # Weights, so scaled that weights times steps are below 2, and fit float16 whatever steps.
        step, zero = _load_relative_to(value_planes, group * SIZE + token, CONSTANTS.value_bits)
        bits = tl.maximum(step, _LEAST_STEP).to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) - 127).to(tl.float32)
        of_block = tl.max(logits + exponent[:, None], axis=0)
        before, largest = largest, tl.maximum(largest, of_block)
        weights = tl.exp2(logits - largest[None, :])
        factor = (weights * step[:, None]).to(tl.float16)
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=0)
        added = weights * zero[:, None] - VALUE_OFFSET * factor.to(tl.float32)
        rest = rest * decay + tl.sum(added, axis=0)
        # [D / 4, group tokens]
        codes = _load_codes(
            value_planes,
            words + token[None, :] * QUARTER + word[:, None],
            CONSTANTS.value_bits,
            INTERPRETED,
        )
        sums = [tl.dot(codes[i], factor, sums[i] * decay[None, :]) for i in (0, 1, 2, 3)]
    # From quarters to channels in order.
    halves = tl.join(tl.join(sums[0], sums[1]), tl.join(sums[2], sums[3]))
    ordered = tl.reshape(tl.permute(halves, (2, 0, 3, 1)), (HEAD_DIM, PADDED))
    return (ordered + rest[None, :],), largest, total
