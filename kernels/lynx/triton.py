"""Lynx codes on a GPU, Triton; coded/triton.py says what each function here does.

A channel's minimum and span hold for a page, so that they are multiplied with the query, once a
block; its mean and spread for a chunk, whose mean is multiplied with the query, and its spread with
the signed fractions of each token:

    q·k = Σ (q span) (spread f) + Σ q (minimum + span mean)
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from cache_rank_kernels.coded import triton as coded
from cache_rank_kernels.coded.format import Format, Own
from cache_rank_kernels.coded.parts import (
    digit_columns,
    is_finite,
    load_group,
    power_below,
    quotient,
    store_gathered,
)
from cache_rank_kernels.coded.reference import CodedTokens
from cache_rank_kernels.lynx.fractions import (
    half_part,
    instructions,
    keys_of_codes,
    magnitude_of,
    table_words,
)
from cache_rank_kernels.lynx.reference import (
    CHUNK,
    LEVELS,
    PAGE,
    LynxCodec,
    boundaries_of_levels,
    fractions_of_levels,
)
from cache_rank_kernels.nibbles.triton import pack_nibbles
from cache_rank_kernels.score.triton import store_logits
from torch import Tensor

_ENCODED_CHANNELS = 16
"""Of each half that are encoded at once: as many as registers hold pages of."""


_SCORED_ELEMENTS = 16384
"""Of a block of keys: as many as 128 threads have registers for."""


class _Encoding(NamedTuple):
    """Tokens of a chunk, and channels of each half that are encoded at once."""

    chunk: int
    channels: int


class _Scoring(NamedTuple):
    """What scores are compiled for.

    Attributes:
        chunk: tokens of a chunk.
        chunks: of a block; with 128 channels, a warp deals with one of them.
        columns: of the product, of a query head.
        in_full: read residuals too.
        instructions: that make keys of codes.
    """

    chunk: int
    chunks: int
    columns: int
    in_full: bool
    instructions: str


def _codec(tokens: CodedTokens) -> LynxCodec:
    """Of keys and of values."""
    codec = tokens.codecs[0]
    assert isinstance(codec, LynxCodec)
    return codec


def _encoding(tokens: CodedTokens) -> Own:
    alpha, ring = _codec(tokens).alpha, tokens.rings[0]
    tables = (_padded_boundaries(alpha, ring.device), fractions_of_levels(alpha, ring.device))
    return Own(tables, _Encoding(CHUNK, min(_ENCODED_CHANNELS, ring.shape[-1] // 2)))


def _scoring(
    tokens: CodedTokens, queries: Tensor, out: Tensor, exact: bool, chunks: int | None = None
) -> Own:
    codec, head_dim = _codec(tokens), queries.shape[-1]
    alpha, in_full = codec.alpha, codec.reads_in_full(exact)
    chunks = chunks or min(PAGE // CHUNK, max(1, _SCORED_ELEMENTS // (CHUNK * head_dim)))
    columns = digit_columns(queries, out, 2)
    constants = _Scoring(CHUNK, chunks, columns, in_full, instructions(alpha, in_full))
    device = queries.device
    return Own((fractions_of_levels(alpha, device), table_words(alpha, device)), constants)


@lru_cache(maxsize=16)
def _padded_boundaries(alpha: float, device: torch.device) -> Tensor:
    """(128,) float32: `boundaries_of_levels`, and infinities."""
    boundaries = boundaries_of_levels(alpha, device)
    return torch.nn.functional.pad(boundaries, (0, 128 - LEVELS), value=float("inf"))


@triton.jit
def _sum_of_chunks(chunks, COUNT: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """Sums of (COUNT, CHUNK, CHANNELS) over each chunk, by halves, as the reference adds."""
    half: tl.constexpr = CHUNK // 2
    halves = tl.sum(tl.reshape(chunks, (COUNT, 2, half, CHANNELS)), axis=1)
    if half == 1:
        return tl.reshape(halves, (COUNT, CHANNELS))
    else:
        return _sum_of_chunks(halves, COUNT, half, CHANNELS)


@triton.jit
def _level_of(fraction, boundaries):
    """How many boundaries are below each fraction, by bisection."""
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
    OWN: tl.constexpr,
):
    """Encode some channels of a page, (P, channels) float32, but for writing nibbles.

    Returns:
        (P, channels) int32 anchors and residuals, and whether each channel's span is finite.
    """
    _, _, minimums, spans, means, spreads = planes
    count: tl.constexpr = LAYOUT.group_tokens // OWN.chunk
    channel = first_channel + tl.arange(0, OWN.channels)
    minimum = tl.min(page, axis=0)
    span = tl.max(page, axis=0) - minimum
    tl.store(minimums + group * LAYOUT.head_dim + channel, minimum)
    tl.store(spans + group * LAYOUT.head_dim + channel, span)
    normalized = quotient(page - minimum[None, :], span[None, :])
    chunks = tl.reshape(normalized, (count, OWN.chunk, OWN.channels))
    mean = (_sum_of_chunks(chunks, count, OWN.chunk, OWN.channels) * (1 / OWN.chunk)).to(tl.float16)
    centred = chunks - mean.to(tl.float32)[:, None, :]
    spread = tl.max(tl.abs(centred), axis=1).to(tl.float16)
    at = (group * count + tl.arange(0, count))[:, None] * LAYOUT.head_dim + channel[None, :]
    tl.store(means + at, mean)
    tl.store(spreads + at, spread)
    level = _level_of(quotient(tl.abs(centred), spread.to(tl.float32)[:, None, :]), boundaries)
    magnitude = (level + 7) >> 4
    anchor = tl.where(centred < 0.0, -magnitude - 1, magnitude)
    residual = 16 * magnitude - level
    shape: tl.constexpr = (LAYOUT.group_tokens, OWN.channels)
    return tl.reshape(anchor, shape), tl.reshape(residual, shape), is_finite(span)


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
    """See `Format`."""
    anchors, residuals = planes[0], planes[1]
    half: tl.constexpr = LAYOUT.head_dim // 2
    channel = tl.arange(0, OWN.channels)
    token = group * LAYOUT.group_tokens + tl.arange(0, LAYOUT.group_tokens)
    every_finite = tl.full((), 1, tl.int32)
    for first in range(0, half, OWN.channels):
        low = load_group(source, first + channel, LAYOUT)
        high = load_group(source, first + half + channel, LAYOUT)
        low_anchor, low_residual, low_finite = _encode_channels(
            low, first, group, planes, tables[0], LAYOUT, OWN
        )
        high_anchor, high_residual, high_finite = _encode_channels(
            high, first + half, group, planes, tables[0], LAYOUT, OWN
        )
        at = token[:, None] * half + first + channel[None, :]
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
    is_coded,
    message,
    tables,
    OF_KEYS: tl.constexpr,
    LAYOUT: tl.constexpr,
    OWN: tl.constexpr,
):
    """See `Format`."""
    anchors, residuals, minimums, spans, means, spreads = planes
    half: tl.constexpr = LAYOUT.head_dim // 2
    dims = tl.arange(0, half)
    mask = is_coded[:, None]
    at = token[:, None] * half + dims[None, :]
    anchor_bytes = tl.load(anchors + at, mask=mask, other=0).to(tl.int32)
    residual_bytes = tl.load(residuals + at, mask=mask, other=0).to(tl.int32)
    for is_high in tl.static_range(2):
        channel = dims[None, :] + is_high * half
        anchor = (((anchor_bytes >> 4 * is_high) & 15) ^ 8) - 8
        residual = (((residual_bytes >> 4 * is_high) & 15) ^ 8) - 8
        level = 16 * magnitude_of(anchor) - residual
        fraction = tl.load(tables[1] + level, mask=mask, other=0.0)
        fraction = tl.where(anchor < 0, -fraction, fraction)
        of_page = (token // LAYOUT.group_tokens)[:, None] * LAYOUT.head_dim + channel
        of_chunk = (token // OWN.chunk)[:, None] * LAYOUT.head_dim + channel
        minimum = tl.load(minimums + of_page, mask=mask, other=0.0)
        span = tl.load(spans + of_page, mask=mask, other=0.0)
        mean = tl.load(means + of_chunk, mask=mask, other=0.0).to(tl.float32)
        spread = tl.load(spreads + of_chunk, mask=mask, other=0.0).to(tl.float32)
        decoded = minimum + span * (mean + spread * fraction)
        store_gathered(message, decoded, dims + is_high * half, LAYOUT)


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
    anchors, residuals, minimums, spans, means, spreads = planes
    chunks: tl.constexpr = OWN.chunks
    columns: tl.constexpr = PADDED * OWN.columns
    half: tl.constexpr = LAYOUT.head_dim // 2
    block: tl.constexpr = chunks * OWN.chunk
    dtype: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
    instructions: tl.constexpr = OWN.instructions
    column = tl.arange(0, columns)
    part = column % OWN.columns
    dims = tl.arange(0, half)
    query_at = (column // OWN.columns)[:, None] * LAYOUT.head_dim + dims[None, :]
    used = ((column // OWN.columns < GROUP) & (part < 2))[:, None]
    low_query = tl.load(queries + query_at, mask=used, other=0.0) * scale
    high_query = tl.load(queries + query_at + half, mask=used, other=0.0) * scale
    word_at = tables[1] + tl.arange(0, chunks)[:, None, None]
    words = (tl.load(word_at), tl.load(word_at + LAYOUT.group_tokens // OWN.chunk))
    for first in tl.range(start, coded_stop, block, num_stages=STAGES):
        page = tl.load(pages + first // LAYOUT.page).to(tl.int64)
        tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
        in_pool = tile * LAYOUT.page + first % LAYOUT.page
        channel = in_pool // LAYOUT.group_tokens * LAYOUT.head_dim + dims
        low_folded = low_query * tl.load(spans + channel)[None, :]
        high_folded = high_query * tl.load(spans + channel + half)[None, :]
        unit = power_below(tl.max(tl.maximum(tl.abs(low_folded), tl.abs(high_folded)), axis=1))
        low_parts = _by_chunk(half_part(low_folded, part, unit, dtype), chunks)
        high_parts = _by_chunk(half_part(high_folded, part, unit, dtype), chunks)
        low_rest = low_query * tl.load(minimums + channel)[None, :]
        high_rest = high_query * tl.load(minimums + channel + half)[None, :]
        rest = tl.where(part == 0, tl.sum(low_rest + high_rest, axis=1), 0.0)
        weight = tl.where(part == 0, unit, unit / 2048)

        chunk = in_pool // OWN.chunk + tl.arange(0, chunks)
        of_chunk = chunk[:, None, None] * LAYOUT.head_dim + dims[None, None, :]
        in_chunk = tl.arange(0, OWN.chunk)[None, :, None]
        at = (chunk[:, None, None] * OWN.chunk + in_chunk) * half + dims[None, None, :]
        anchor_bytes = tl.load(anchors + at)
        low, high = keys_of_codes(
            anchor_bytes,
            tl.load(residuals + at) if OWN.in_full else anchor_bytes,
            tl.load(spreads + of_chunk),
            tl.load(spreads + of_chunk + half),
            words,
            tables[0],
            instructions,
            OWN.in_full,
            INTERPRETED,
        )
        low_mean = tl.broadcast_to(tl.load(means + of_chunk).to(dtype), low.shape)
        high_mean = tl.broadcast_to(tl.load(means + of_chunk + half).to(dtype), low.shape)
        products = tl.dot(low_mean, low_parts, input_precision="ieee")
        products = tl.dot(high_mean, high_parts, products, input_precision="ieee")
        products = tl.dot(low, low_parts, products, input_precision="ieee")
        products = tl.dot(high, high_parts, products, input_precision="ieee")
        weighted = products * weight + rest
        logit = tl.sum(tl.reshape(weighted, (block, PADDED, OWN.columns)), axis=2)
        token = first + tl.arange(0, block)
        store_logits(logit, token, token < coded_stop, logits, PADDED)


@triton.jit
def _by_chunk(parts, CHUNKS: tl.constexpr):
    """The right operand of a product a chunk, (CHUNKS, HALF, COLUMNS), from (COLUMNS, HALF)."""
    operand = tl.trans(parts)[None, :, :]
    return tl.broadcast_to(operand, (CHUNKS, operand.shape[1], operand.shape[2]))


FORMAT = Format(_encode, _gather, _logits, _encoding, _scoring, keys_as_values=True)

encode_groups = partial(coded.encode_groups, FORMAT)
gather_codes = partial(coded.gather_codes, FORMAT)
# The page table is read some stages before the keys, of which two blocks are under way then. With
# so many registers 16 warps share a multiprocessor.
score_codes = partial(coded.score_codes, FORMAT, stages=5, registers=128)
