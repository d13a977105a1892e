"""Lynx codes, Triton: the functions of the format; `Format` says what each of them does.

A channel has one minimum and span for a page, so that the query is multiplied with them, once a
block. It has one mean and spread for a chunk: the mean is multiplied with the query, and the spread
with the signed fraction f of each token:

    q·k = Σ (q span) (spread f) + Σ q (minimum + span mean)
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.coded.format import Format, Launch, Parameters
from cache_rank.kernels.coded.int8_split import int8_columns, load_query_half
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.rounding import is_finite, power_below, quotient
from cache_rank.kernels.coded.tokens import load_group, place_in_pages, store_gathered
from cache_rank.kernels.lynx.attending import attend, attend_many, attending
from cache_rank.kernels.lynx.decoding import (
    half_part,
    instructions,
    keys_of_codes,
    signed_fraction,
    table_words,
)
from cache_rank.kernels.lynx.reference import (
    CHUNK,
    LEVELS,
    PAGE,
    LynxCodec,
    boundaries_of_levels,
    fractions_of_levels,
)
from cache_rank.kernels.nibbles.triton import pack_nibbles
from cache_rank.kernels.score.triton import store_logits

_ENCODED_CHANNELS = 16
"""This many channels of each half are encoded at once: registers hold a page of them."""

_SCORED_ELEMENTS = 16384
"""A block of keys has this many elements: 128 threads have registers for them."""

_LAUNCH = Launch(stages=5, registers=128)
"""The page table is read some stages before the keys, of which two blocks are under way then. With
this many registers 16 warps share a multiprocessor."""


class _Encoding(NamedTuple):
    """What `_encode` and `_gather` are compiled for.

    Attributes:
        chunk: the tokens of a chunk.
        channels: how many channels of each half are encoded at once.
    """

    chunk: int
    channels: int


class _Scoring(NamedTuple):
    """What `_logits` is compiled for.

    Attributes:
        chunk: the tokens of a chunk.
        chunks: the chunks of a block; with 128 channels, a warp deals with one of them.
        columns: how many columns of the product a query head has.
        in_full: whether residuals are read too.
        instructions: the PTX that makes keys of codes.
    """

    chunk: int
    chunks: int
    columns: int
    in_full: bool
    instructions: str


def _codec(tokens: CodedTokens) -> LynxCodec:
    """The codec of keys and of values."""
    codec = tokens.codecs[0]
    assert isinstance(codec, LynxCodec)
    return codec


def _encoding(tokens: CodedTokens) -> Parameters:
    alpha, ring = _codec(tokens).alpha, tokens.rings[0]
    tables = (_padded_boundaries(alpha, ring.device), fractions_of_levels(alpha, ring.device))
    return Parameters(tables, _Encoding(CHUNK, min(_ENCODED_CHANNELS, ring.shape[-1] // 2)))


def _scoring(tokens: CodedTokens, queries: Tensor, out: Tensor) -> Parameters:
    codec, head_dim = _codec(tokens), queries.shape[-1]
    alpha, in_full = codec.alpha, codec.reads_residuals
    chunks = min(PAGE // CHUNK, max(1, _SCORED_ELEMENTS // (CHUNK * head_dim)))
    columns = int8_columns(queries, out)
    constants = _Scoring(CHUNK, chunks, columns, in_full, instructions(alpha, in_full))
    device = queries.device
    tables = (fractions_of_levels(alpha, device), table_words(alpha, device))
    return Parameters(tables, constants, _LAUNCH)


@lru_cache(maxsize=16)
def _padded_boundaries(alpha: float, device: torch.device) -> Tensor:
    """`boundaries_of_levels`, padded with infinities: (128,) float32."""
    boundaries = boundaries_of_levels(alpha, device)
    return torch.nn.functional.pad(boundaries, (0, 128 - LEVELS), value=float("inf"))


@triton.jit
def _sum_of_chunks(chunks, COUNT: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """Sum (COUNT, CHUNK, CHANNELS) over each chunk by halves, in the order of the reference."""
    HALF: tl.constexpr = CHUNK // 2
    halves = tl.sum(tl.reshape(chunks, (COUNT, 2, HALF, CHANNELS)), axis=1)
    if HALF == 1:
        return tl.reshape(halves, (COUNT, CHANNELS))
    else:
        return _sum_of_chunks(halves, COUNT, HALF, CHANNELS)


@triton.jit
def _level_of(fraction, boundaries):
    """Count by bisection how many boundaries are below each fraction."""
    level = tl.zeros_like(fraction).to(tl.int32)
    for power in tl.static_range(7):
        step = 64 >> power
        below = tl.load(boundaries + level + (step - 1)) < fraction
        level += tl.where(below, step, 0)
    return level


@triton.jit
def _encode_channels(
    page,
    first_channel,
    group,
    planes,
    boundaries,
    LAYOUT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Encode some channels of a page, (P, channels) float32, and write all but the nibbles.

    Returns:
        (P, channels) int32 anchors and residuals, and whether each channel's span is finite.
    """
    _, _, minimums, spans, means, spreads = planes
    COUNT: tl.constexpr = LAYOUT.group_tokens // CONSTANTS.chunk
    channel = first_channel + tl.arange(0, CONSTANTS.channels)
    minimum = tl.min(page, axis=0)
    span = tl.max(page, axis=0) - minimum
    tl.store(minimums + group * LAYOUT.head_dim + channel, minimum)
    tl.store(spans + group * LAYOUT.head_dim + channel, span)
    normalized = quotient(page - minimum[None, :], span[None, :])
    chunks = tl.reshape(normalized, (COUNT, CONSTANTS.chunk, CONSTANTS.channels))
    mean = (
        _sum_of_chunks(chunks, COUNT, CONSTANTS.chunk, CONSTANTS.channels) * (1 / CONSTANTS.chunk)
    ).to(tl.float16)
    centred = chunks - mean.to(tl.float32)[:, None, :]
    spread = tl.max(tl.abs(centred), axis=1).to(tl.float16)
    at = (group * COUNT + tl.arange(0, COUNT))[:, None] * LAYOUT.head_dim + channel[None, :]
    tl.store(means + at, mean)
    tl.store(spreads + at, spread)
    level = _level_of(quotient(tl.abs(centred), spread.to(tl.float32)[:, None, :]), boundaries)
    magnitude = (level + 7) >> 4
    anchor = tl.where(centred < 0.0, -magnitude - 1, magnitude)
    residual = 16 * magnitude - level
    SHAPE: tl.constexpr = (LAYOUT.group_tokens, CONSTANTS.channels)
    return tl.reshape(anchor, SHAPE), tl.reshape(residual, SHAPE), is_finite(span)


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
    """Encode one page, some channels of each half at a time; see `Format`."""
    anchors, residuals = planes[0], planes[1]
    HALF: tl.constexpr = LAYOUT.head_dim // 2
    channel = tl.arange(0, CONSTANTS.channels)
    token = group * LAYOUT.group_tokens + tl.arange(0, LAYOUT.group_tokens)
    every_finite = tl.full((), 1, tl.int32)
    for first in range(0, HALF, CONSTANTS.channels):
        # [P, channels] each
        low = load_group(source, first + channel, LAYOUT)
        high = load_group(source, first + HALF + channel, LAYOUT)
        low_anchor, low_residual, low_finite = _encode_channels(
            low, first, group, planes, tables[0], LAYOUT, CONSTANTS
        )
        high_anchor, high_residual, high_finite = _encode_channels(
            high, first + HALF, group, planes, tables[0], LAYOUT, CONSTANTS
        )
        at = token[:, None] * HALF + first + channel[None, :]
        tl.store(anchors + at, pack_nibbles(low_anchor, high_anchor))
        tl.store(residuals + at, pack_nibbles(low_residual, high_residual))
        of_tokens = tl.min((is_finite(low) & is_finite(high)).to(tl.int32))
        of_spans = tl.min((low_finite & high_finite).to(tl.int32))
        every_finite = tl.minimum(every_finite, tl.minimum(of_tokens, of_spans))
    return every_finite


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
    anchors, residuals, minimums, spans, means, spreads = planes
    HALF: tl.constexpr = LAYOUT.head_dim // 2
    dims = tl.arange(0, HALF)
    mask = target.is_coded[:, None]
    at = token[:, None] * HALF + dims[None, :]
    anchor_bytes = tl.load(anchors + at, mask=mask, other=0).to(tl.int32)
    residual_bytes = tl.load(residuals + at, mask=mask, other=0).to(tl.int32)
    for is_high in tl.static_range(2):
        channel = dims[None, :] + is_high * HALF
        anchor = (anchor_bytes >> 4 * is_high) & 15
        residual = (residual_bytes >> 4 * is_high) & 15
        fraction = signed_fraction(anchor, residual, tables[1], IN_FULL=True)  # [n, D / 2]
        of_page = (token // LAYOUT.group_tokens)[:, None] * LAYOUT.head_dim + channel
        of_chunk = (token // CONSTANTS.chunk)[:, None] * LAYOUT.head_dim + channel
        minimum = tl.load(minimums + of_page, mask=mask, other=0.0)
        span = tl.load(spans + of_page, mask=mask, other=0.0)
        mean = tl.load(means + of_chunk, mask=mask, other=0.0).to(tl.float32)
        spread = tl.load(spreads + of_chunk, mask=mask, other=0.0).to(tl.float32)
        decoded = minimum + span * (mean + spread * fraction)
        store_gathered(target, decoded, is_high * HALF, LAYOUT)


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
    """Compute the logits of the keys [start, coded_stop) of a unit; see `Format`.

    A query head has two columns of a product: its query in half precision, and what that leaves.
    """
    anchors, residuals, minimums, spans, means, spreads = planes
    CHUNKS: tl.constexpr = CONSTANTS.chunks
    COLUMNS: tl.constexpr = PADDED * CONSTANTS.columns
    HALF: tl.constexpr = LAYOUT.head_dim // 2
    BLOCK: tl.constexpr = CHUNKS * CONSTANTS.chunk
    DTYPE: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
    INSTRUCTIONS: tl.constexpr = CONSTANTS.instructions
    # The queries of all columns: [COLUMNS, D / 2] each
    column = tl.arange(0, COLUMNS)
    part = column % CONSTANTS.columns
    dims = tl.arange(0, HALF)
    WIDTH: tl.constexpr = CONSTANTS.columns
    low_query = load_query_half(queries, 0, scale, GROUP, PADDED, LAYOUT.head_dim, WIDTH)
    high_query = load_query_half(queries, 1, scale, GROUP, PADDED, LAYOUT.head_dim, WIDTH)
    word_at = tables[1] + tl.arange(0, CHUNKS)[:, None, None]
    words = (tl.load(word_at), tl.load(word_at + LAYOUT.group_tokens // CONSTANTS.chunk))
    for first in tl.range(start, coded_stop, BLOCK, num_stages=STAGES):
        in_pool = place_in_pages(pages, first, layer, head, LAYOUT)
        # Queries times spans, in two parts, and what the minimums add.
        channel = in_pool // LAYOUT.group_tokens * LAYOUT.head_dim + dims
        low_folded = low_query * tl.load(spans + channel)[None, :]
        high_folded = high_query * tl.load(spans + channel + HALF)[None, :]
        unit = power_below(tl.max(tl.maximum(tl.abs(low_folded), tl.abs(high_folded)), axis=1))
        low_parts = _by_chunk(half_part(low_folded, part, unit, DTYPE), CHUNKS)
        high_parts = _by_chunk(half_part(high_folded, part, unit, DTYPE), CHUNKS)
        low_rest = low_query * tl.load(minimums + channel)[None, :]
        high_rest = high_query * tl.load(minimums + channel + HALF)[None, :]
        rest = tl.where(part == 0, tl.sum(low_rest + high_rest, axis=1), 0.0)
        weight = tl.where(part == 0, unit, unit / 2048)

        # Keys about the means of their chunks: [CHUNKS, chunk, D / 2] each
        chunk = in_pool // CONSTANTS.chunk + tl.arange(0, CHUNKS)
        of_chunk = chunk[:, None, None] * LAYOUT.head_dim + dims[None, None, :]
        in_chunk = tl.arange(0, CONSTANTS.chunk)[None, :, None]
        at = (chunk[:, None, None] * CONSTANTS.chunk + in_chunk) * HALF + dims[None, None, :]
        anchor_bytes = tl.load(anchors + at)
        low, high = keys_of_codes(
            anchor_bytes,
            tl.load(residuals + at) if CONSTANTS.in_full else anchor_bytes,
            tl.load(spreads + of_chunk),
            tl.load(spreads + of_chunk + HALF),
            words,
            tables[0],
            INSTRUCTIONS,
            CONSTANTS.in_full,
            INTERPRETED,
        )
        # Products of the queries with the means and with these keys: [CHUNKS, chunk, COLUMNS]
        low_mean = tl.broadcast_to(tl.load(means + of_chunk).to(DTYPE), low.shape)
        high_mean = tl.broadcast_to(tl.load(means + of_chunk + HALF).to(DTYPE), low.shape)
        products = tl.dot(low_mean, low_parts, input_precision="ieee")
        products = tl.dot(high_mean, high_parts, products, input_precision="ieee")
        products = tl.dot(low, low_parts, products, input_precision="ieee")
        products = tl.dot(high, high_parts, products, input_precision="ieee")
        weighted = products * weight + rest
        logit = tl.sum(tl.reshape(weighted, (BLOCK, PADDED, CONSTANTS.columns)), axis=2)
        token = first + tl.arange(0, BLOCK)
        store_logits(logit, token, token < coded_stop, logits, PADDED)


@triton.jit
def _by_chunk(parts, CHUNKS: tl.constexpr):
    """Repeat (COLUMNS, HALF) as the right operand of a product a chunk, (CHUNKS, HALF, COLUMNS)."""
    operand = tl.trans(parts)[None, :, :]
    return tl.broadcast_to(operand, (CHUNKS, operand.shape[1], operand.shape[2]))


FORMAT = Format(
    _encode,
    _gather,
    _logits,
    _encoding,
    _scoring,
    keys_as_values=True,
    attend=attend,
    attend_many=attend_many,
    attending=attending,
)
