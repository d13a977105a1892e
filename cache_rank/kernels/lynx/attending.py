"""Attention over Lynx codes where they lie, Triton.

A chunk is decoded as its codes lie in the operands of the matrix unit, words of 16 bits that have
codes of four channels; see `parts_of_words`. With the level I = 16 V - r of an anchor and a
residual, and t = I / 128, an element is

    x = (minimum + span mean) ± (span spread) |f|,  |f| = ((1 + α)^(I / 120) - 1) / α ≈ t p(t)

The two factors in front are of a channel and chunk, so that an element takes but a polynomial: of
degree 3 with the default α, and 8 at most. All is half precision, in a unit of the page. With α = 1
that makes an element wrong by 0.07 of a level at most, and by a fourteenth of what rounding to
levels does in the root mean square.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from cache_rank.kernels.coded.format import Launch, Parameters
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.rounding import power_below
from cache_rank.kernels.coded.tokens import place_in_pages
from cache_rank.kernels.lynx.decoding import half_constants
from cache_rank.kernels.lynx.reference import CHUNK, LEVELS, LynxCodec, fraction_of
from cache_rank.kernels.nibbles.triton import (
    channels_of_joined,
    join_parts,
    parts_of_words,
    split_parts,
)

_ALLOWED = 1 / 16
"""The polynomial may be off by this share of a level, beside what half precision rounds."""

_HEADROOM = tl.constexpr(14.0)
"""The largest weight is 2 to this power: smaller ones then stay in the range of float16."""

_MANY_CHUNKS = tl.constexpr(2)
"""`attend_many` decodes so many chunks of a page at a time."""


class _Attending(NamedTuple):
    """What `attend` and `attend_many` are compiled for.

    Attributes:
        chunk: the tokens of a chunk.
        in_full: whether residuals are read too.
        coefficients: see `level_coefficients`.
        instructions: of each part, see `part_instructions`.
    """

    chunk: int
    in_full: bool
    coefficients: tuple[float, ...]
    instructions: tuple[str, str, str, str]


def attending(tokens: CodedTokens, padded: int) -> Parameters:
    """See `Format`. Few queries take one warp, which then waits for no other."""
    codec = tokens.codecs[0]
    assert isinstance(codec, LynxCodec)
    assert not tokens.unfinished
    assert tokens.codecs[1] == codec
    alpha, in_full = codec.alpha, codec.reads_residuals
    coefficients = level_coefficients(alpha)
    constants = _Attending(CHUNK, in_full, coefficients, part_instructions(alpha, in_full))
    if padded > 8:
        launch = Launch(warps=4 if padded <= 64 else 8)
    elif tokens.rings[0].shape[-1] <= 128:
        launch = Launch(warps=1, registers=168, programs=12)
    else:
        launch = Launch(warps=2, programs=4)
    return Parameters((), constants, launch)


@functools.lru_cache(maxsize=16)
def level_coefficients(alpha: float) -> tuple[float, ...]:
    """The coefficients of t, t², ...: as few as make |f| of all levels."""
    levels = torch.arange(LEVELS + 1, dtype=torch.float64)
    fractions = torch.tensor([fraction_of(level, alpha) for level in range(LEVELS + 1)]).double()
    # An error counts in levels: |f| grows by so much from one to the next.
    steps = (math.log1p(alpha) / LEVELS * (fractions + 1 / alpha)).unsqueeze(-1)
    for degree in range(2, 9):
        powers = torch.stack([(levels / 128) ** power for power in range(1, degree + 1)], dim=1)
        found = torch.linalg.lstsq(powers / steps, fractions.unsqueeze(-1) / steps).solution
        if float(((powers @ found - fractions.unsqueeze(-1)) / steps).abs().max()) < _ALLOWED:
            break
    return tuple(found.squeeze(-1).tolist())


# PTX. See `decoding` for how the tables of lop3 are read; 0xE4 takes bits of the
# first operand where the third has ones, else of the second. Instructions with several results
# would not be moved to where codes lie as operands.

FLIPPED = tl.constexpr("""{
        .reg .b32 sign, flip;
        and.b32 sign, $1, 0x88888888;
        shr.b32 flip, sign, 3;
        sub.u32 flip, sign, flip;
        xor.b32 $0, $1, flip; }""")
"""The nibble of a negative anchor is flipped, but for its sign."""

_OPERANDS = """
        .reg .b32 flipped, residuals, spread, mean, high, level, sign, t, f;
        mov.b32 flipped, $1;
        mov.b32 residuals, $2;
        mov.b32 spread, $3;
        mov.b32 mean, $4;
        {shift}.b32 high, flipped, {by};"""

_LEVEL = """
        shr.b32 level, residuals, {start};
        lop3.b32 level, high, level, 0x00700070, 0xE4;
        lop3.b32 level, level, 0x007F007F, 0x64076407, 0x6A;
        fma.rn.f16x2 t, level, unit, minus_1031;"""
"""The lowest bits of 1024 become 16 V and 7 - r: the bits of a residual, of which three flip."""

_LEVEL_OF_ANCHOR = """
        lop3.b32 level, high, 0x00700070, 0x64006400, 0x6A;
        fma.rn.f16x2 t, level, unit, minus_1024;"""

_ELEMENT = """
        mul.rn.f16x2 f, t, f;
        shl.b32 sign, flipped, {sign_shift};
        lop3.b32 f, f, sign, 0x80008000, 0x78;
        fma.rn.f16x2 $0, f, spread, mean;"""


@functools.lru_cache(maxsize=16)
def part_instructions(alpha: float, in_full: bool) -> tuple[str, str, str, str]:
    """PTX that decodes a part of two words of flipped anchors, and of residuals if they are read.

    The other operands are its spreads and means.
    """
    coefficients = level_coefficients(alpha)
    constants = {f"c_{power}": number for power, number in enumerate(coefficients, start=1)}
    constants |= {"unit": 1 / 128, "minus_1031": -1031 / 128, "minus_1024": -8.0}
    powers = range(len(coefficients) - 1, 0, -1)
    polynomial = f"\n        mov.b32 f, c_{len(coefficients)};"
    polynomial += "".join(f"\n        fma.rn.f16x2 f, t, f, c_{power};" for power in powers)
    lines = _OPERANDS + half_constants(constants) + (_LEVEL if in_full else _LEVEL_OF_ANCHOR)
    lines += polynomial + _ELEMENT

    def of_part(part: int) -> str:
        start = part % 2 * 8 + part // 2 * 4
        shift, by = ("shl", 4 - start) if start < 4 else ("shr", start - 4)
        places = {"shift": shift, "by": by, "start": start, "sign_shift": 12 - start}
        return f"{{ {lines.format(**places)} }}"

    return of_part(0), of_part(1), of_part(2), of_part(3)


@triton.jit
def _decode_part(
    anchors,
    residuals,
    spread,
    mean,
    PART: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Decode a part of words of codes: float16 of the shape of the words.

    Args:
        anchors, residuals: uint16, the anchors flipped; residuals may be anything if not read.
        spread, mean: of the part, float16 of a shape that is repeated to that of the words.
    """
    if INTERPRETED:
        START: tl.constexpr = PART % 2 * 8 + PART // 2 * 4
        level = ((anchors >> START) & 7).to(tl.int32) * 16
        if CONSTANTS.in_full:
            level -= (((residuals >> START) & 15).to(tl.int32) ^ 8) - 8
        t = level.to(tl.float32) * (1 / 128)
        fraction = tl.zeros_like(t)
        for number in CONSTANTS.coefficients[::-1]:
            fraction = (fraction + number) * t
        signed = tl.where((anchors >> START) & 8 > 0, -fraction, fraction)
        return (mean.to(tl.float32) + spread.to(tl.float32) * signed).to(tl.float16)
    else:
        INSTRUCTIONS: tl.constexpr = CONSTANTS.instructions[PART]
        return tl.inline_asm_elementwise(
            INSTRUCTIONS,
            "=&r,r,r,r,r",
            [anchors, residuals, spread, mean],
            dtype=tl.float16,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _load_words(planes, at, INTERPRETED: tl.constexpr, CONSTANTS: tl.constexpr):
    """Load words of anchors, which are flipped, and of residuals if they are read."""
    words = tl.load(planes[0].to(tl.pointer_type(tl.uint16)) + at)
    if INTERPRETED:
        sign = words & 0x8888
        anchors = words ^ (sign - (sign >> 3))
    else:
        anchors = tl.inline_asm_elementwise(
            FLIPPED, "=&r,r", [words], dtype=tl.uint16, is_pure=True, pack=2
        )
    if CONSTANTS.in_full:
        return anchors, tl.load(planes[1].to(tl.pointer_type(tl.uint16)) + at)
    else:
        return anchors, words


@triton.jit
def _relative_to(
    planes, place, CHUNKS: tl.constexpr, LAYOUT: tl.constexpr, CONSTANTS: tl.constexpr
):
    """What the codes of chunks of a page are relative to, in a unit, which is a power of two.

    Args:
        place: of the first token of the chunks, among those of all pages.

    Returns:
        The unit, and spreads and means about it, (CHUNKS, D / 4) float16 of each part.
    """
    dims = tl.arange(0, LAYOUT.head_dim)[None, :]
    of_page = place // LAYOUT.group_tokens * LAYOUT.head_dim + dims
    chunk = place // CONSTANTS.chunk + tl.arange(0, CHUNKS)[:, None]
    of_chunk = chunk * LAYOUT.head_dim + dims
    minimum, span = tl.load(planes[2] + of_page), tl.load(planes[3] + of_page)
    mean = minimum + span * tl.load(planes[4] + of_chunk).to(tl.float32)
    spread = span * tl.load(planes[5] + of_chunk).to(tl.float32)
    unit = power_below(tl.max(tl.maximum(tl.abs(minimum), tl.abs(minimum + span))))
    spread, mean = (spread / unit).to(tl.float16), (mean / unit).to(tl.float16)
    return unit, parts_of_words(spread, CHUNKS, 4), parts_of_words(mean, CHUNKS, 4)


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
    """Attend to the tokens [start, stop), chunk after chunk; see `Format`."""
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    WORDS: tl.constexpr = HEAD_DIM // 4
    BLOCK: tl.constexpr = CONSTANTS.chunk
    dims, row = tl.arange(0, HEAD_DIM), tl.arange(0, PADDED)[:, None]
    query = tl.load(queries + row * HEAD_DIM + dims[None, :], mask=row < GROUP, other=0.0) * scale
    query_unit = power_below(tl.max(tl.abs(query), axis=1))
    factors = parts_of_words((query / query_unit[:, None]).to(tl.float16), PADDED, 4)
    word, token = tl.arange(0, WORDS), tl.arange(0, BLOCK)
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    sums = [tl.zeros((WORDS, PADDED), tl.float32) for _ in (0, 1, 2, 3)]
    for first in tl.range(start, stop, BLOCK, num_stages=STAGES):
        place = place_in_pages(pages, first, layer, head, LAYOUT)
        words = place * WORDS
        # [chunk, D / 4] keys of each part, and [chunk, PADDED] logits
        unit, spreads, means = _relative_to(key_planes, place, 1, LAYOUT, CONSTANTS)
        at = words + token[:, None] * WORDS + word[None, :]
        anchors, residuals = _load_words(key_planes, at, INTERPRETED, CONSTANTS)
        keys = [
            _decode_part(anchors, residuals, spreads[i], means[i], i, INTERPRETED, CONSTANTS)
            for i in (0, 1, 2, 3)
        ]
        logits = tl.dot(keys[0], tl.trans(factors[0]))
        for i in tl.static_range(1, 4):
            logits = tl.dot(keys[i], tl.trans(factors[i]), logits)
        logits *= (query_unit * unit)[None, :]
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=0) - _HEADROOM)
        weights = tl.exp2(logits - largest[None, :])
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=0)
        # [D / 4, chunk] values of each part
        unit, spreads, means = _relative_to(value_planes, place, 1, LAYOUT, CONSTANTS)
        at = words + token[None, :] * WORDS + word[:, None]
        anchors, residuals = _load_words(value_planes, at, INTERPRETED, CONSTANTS)
        spreads = [tl.trans(spreads[i]) for i in (0, 1, 2, 3)]
        means = [tl.trans(means[i]) for i in (0, 1, 2, 3)]
        values = [
            _decode_part(anchors, residuals, spreads[i], means[i], i, INTERPRETED, CONSTANTS)
            for i in (0, 1, 2, 3)
        ]
        weights = weights.to(tl.float16)
        sums = [sums[i] * decay[None, :] + tl.dot(values[i], weights) * unit for i in (0, 1, 2, 3)]
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
    """As `attend`, for more queries, which are the rows of products.

    So a code becomes a number once, in shared memory, for queries in all warps.
    """
    HEAD_DIM: tl.constexpr = LAYOUT.head_dim
    WORDS: tl.constexpr = HEAD_DIM // 4
    row = tl.arange(0, PADDED)[:, None]
    own = queries + row * HEAD_DIM + channels_of_joined(WORDS)[None, :]
    query = tl.load(own, mask=row < GROUP, other=0.0) * scale
    query_unit = power_below(tl.max(tl.abs(query), axis=1))
    query = (query / query_unit[:, None]).to(tl.float16)
    largest = tl.full((PADDED,), -1e30, tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    sums = tl.zeros((PADDED, HEAD_DIM), tl.float32)
    for first in tl.range(start, stop, _MANY_CHUNKS * CONSTANTS.chunk, num_stages=STAGES):
        place = place_in_pages(pages, first, layer, head, LAYOUT)
        unit, keys = _decode_chunks(key_planes, place, INTERPRETED, LAYOUT, CONSTANTS)
        logits = tl.dot(query, tl.trans(keys)) * (query_unit * unit)[:, None]
        before, largest = largest, tl.maximum(largest, tl.max(logits, axis=1) - _HEADROOM)
        weights = tl.exp2(logits - largest[:, None])
        decay = tl.exp2(before - largest)
        total = total * decay + tl.sum(weights, axis=1)
        unit, values = _decode_chunks(value_planes, place, INTERPRETED, LAYOUT, CONSTANTS)
        sums = sums * decay[:, None] + tl.dot(weights.to(tl.float16), values) * unit
    parts = split_parts(sums, PADDED, WORDS)
    return [tl.trans(parts[i]) for i in (0, 1, 2, 3)], largest, total


@triton.jit
def _decode_chunks(
    planes, place, INTERPRETED: tl.constexpr, LAYOUT: tl.constexpr, CONSTANTS: tl.constexpr
):
    """Decode _MANY_CHUNKS from a place on: [tokens, D] in a unit, by `channels_of_joined`."""
    CHUNKS: tl.constexpr = _MANY_CHUNKS
    WORDS: tl.constexpr = LAYOUT.head_dim // 4
    TOKENS: tl.constexpr = CHUNKS * CONSTANTS.chunk
    unit, spreads, means = _relative_to(planes, place, CHUNKS, LAYOUT, CONSTANTS)
    token = tl.reshape(place + tl.arange(0, TOKENS), (CHUNKS, CONSTANTS.chunk, 1))
    words = token * WORDS + tl.arange(0, WORDS)[None, None, :]
    anchors, residuals = _load_words(planes, words, INTERPRETED, CONSTANTS)
    decoded = [
        _decode_part(
            anchors,
            residuals,
            spreads[i][:, None, :],
            means[i][:, None, :],
            i,
            INTERPRETED,
            CONSTANTS,
        )
        for i in (0, 1, 2, 3)
    ]
    parts = [tl.reshape(decoded[i], (TOKENS, WORDS)) for i in (0, 1, 2, 3)]
    return unit, join_parts(parts, TOKENS, WORDS)
