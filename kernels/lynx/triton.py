"""Lynx codes on a GPU, Triton; coded/triton.py says what each function here does.

A channel's minimum and span hold for a page and its mean and spread for a chunk, so that they are
multiplied with the query, once a chunk, and the query with the signed fractions alone:

    q·k = Σ (q span spread) f + Σ q (minimum + span mean)
"""

from __future__ import annotations

import math
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
    load_query_half,
    power_below,
    query_digits,
    quotient,
    store_gathered,
    sum_of_digits,
)
from cache_rank_kernels.coded.reference import CodedTokens
from cache_rank_kernels.lynx.fractions import (
    anchor_fractions,
    anchor_instructions,
    anchor_table,
    anchor_unit,
    anchors_are_integers,
    full_fractions,
    half_parts,
    magnitude_of,
    signed_levels,
)
from cache_rank_kernels.lynx.reference import (
    CHUNK,
    LEVELS,
    LynxCodec,
    boundaries_of_levels,
    fractions_of_levels,
)
from cache_rank_kernels.nibbles.triton import pack_nibbles
from cache_rank_kernels.score.triton import store_logits
from torch import Tensor

_ENCODED_CHANNELS = 16
"""Of each half that are encoded at once: as many as registers hold pages of."""


class _Encoding(NamedTuple):
    """Tokens of a chunk, and channels of each half that are encoded at once."""

    chunk: int
    channels: int


class _Scoring(NamedTuple):
    """What scores are compiled for.

    Attributes:
        chunk: tokens of a chunk.
        chunks: of a block; a warp deals with one of them when there are as many warps.
        in_full: read residuals too.
        as_integers: multiply anchors as integers, if they are read alone.
        instructions: that look them up.
        digits, columns: of queries that are multiplied with integers, and of each of their heads.
    """

    chunk: int
    chunks: int
    in_full: bool
    as_integers: bool
    instructions: str
    digits: int
    columns: int


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
    tokens: CodedTokens,
    queries: Tensor,
    out: Tensor,
    exact: bool,
    digits: int = 2,
    chunks: int = 4,
) -> Own:
    """For anchors, queries are rounded to 2 or 3 `digits`; see `query_digits`."""
    codec = _codec(tokens)
    alpha = codec.alpha
    tables = (
        anchor_table(alpha, queries.device),
        math.log2(1 + alpha) / LEVELS,
        1 / alpha,
        anchor_unit(alpha),
    )
    constants = _Scoring(
        CHUNK,
        chunks,
        codec.reads_in_full(exact),
        anchors_are_integers(alpha),
        anchor_instructions(alpha),
        digits,
        digit_columns(queries, out, digits),
    )
    return Own(tables, constants)


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
def _fold(
    query,
    channel,
    page_at,
    chunk_at,
    planes,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    """Queries of each chunk, for its fractions, and their products with the rest of a key.

    Args:
        query: (PADDED, HALF) float32.
        channel: (HALF,) channels.
        page_at, chunk_at: of channel 0 of the page, and of (CHUNKS,) chunks.

    Returns:
        (CHUNKS * PADDED, HALF) queries; (CHUNKS, PADDED, HALF) products, to be summed; and
        (PADDED,) what no query exceeds.
    """
    _, _, minimums, spans, means, spreads = planes
    span = tl.load(spans + page_at + channel)
    minimum = tl.load(minimums + page_at + channel)
    at = chunk_at[:, None] + channel[None, :]
    spread = tl.load(spreads + at).to(tl.float32) * span[None, :]
    offset = tl.load(means + at).to(tl.float32) * span[None, :] + minimum[None, :]
    folded = tl.reshape(query[None, :, :] * spread[:, None, :], (CHUNKS * PADDED, HALF))
    # A spread is at most 1, in units of the span.
    largest = tl.max(tl.abs(query * span[None, :]), axis=1)
    return folded, query[None, :, :] * offset[:, None, :], largest


@triton.jit
def _by_chunk(parts, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr):
    """The right operand of a product a chunk, (CHUNKS, HALF, COLUMNS)."""
    return tl.permute(tl.reshape(parts, (CHUNKS, COLUMNS, HALF)), (0, 2, 1))


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
    table, log2_step, inverse_alpha, anchor_unit = tables
    instructions: tl.constexpr = OWN.instructions
    chunks: tl.constexpr = OWN.chunks
    columns: tl.constexpr = PADDED * OWN.columns
    half: tl.constexpr = LAYOUT.head_dim // 2
    block: tl.constexpr = chunks * OWN.chunk
    rows: tl.constexpr = chunks * PADDED
    low_query = load_query_half(queries, 0, scale, GROUP, PADDED, LAYOUT.head_dim)
    high_query = load_query_half(queries, 1, scale, GROUP, PADDED, LAYOUT.head_dim)
    dims = tl.arange(0, half)
    for first in tl.range(start, coded_stop, block, num_stages=STAGES):
        page = tl.load(pages + first // LAYOUT.page).to(tl.int64)
        tile = (page * LAYOUT.layers + layer) * LAYOUT.kv_heads + head
        in_pool = tile * LAYOUT.page + first % LAYOUT.page
        page_at = in_pool // LAYOUT.group_tokens * LAYOUT.head_dim
        chunk_at = (in_pool // OWN.chunk + tl.arange(0, chunks)) * LAYOUT.head_dim
        low_folded, low_rest, low_largest = _fold(
            low_query, dims, page_at, chunk_at, planes, chunks, PADDED, half
        )
        high_folded, high_rest, high_largest = _fold(
            high_query, dims + half, page_at, chunk_at, planes, chunks, PADDED, half
        )
        head_unit = power_below(tl.maximum(low_largest, high_largest))
        query_unit = tl.reshape(tl.broadcast_to(head_unit[None, :], (chunks, PADDED)), (rows,))

        at_chunk = tl.arange(0, chunks)[:, None, None] * OWN.chunk
        in_chunk = tl.arange(0, OWN.chunk)[None, :, None]
        at = (in_pool + at_chunk + in_chunk) * half + dims[None, None, :]
        anchor_bytes = tl.load(planes[0] + at)
        if OWN.in_full or not OWN.as_integers:
            dtype: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
            residual_bytes = tl.load(planes[1] + at) if OWN.in_full else tl.zeros_like(anchor_bytes)
            low_levels, high_levels = signed_levels(anchor_bytes, residual_bytes, INTERPRETED)
            low = full_fractions(low_levels, log2_step, inverse_alpha, dtype, INTERPRETED)
            high = full_fractions(high_levels, log2_step, inverse_alpha, dtype, INTERPRETED)
            low_folded *= (1 / query_unit)[:, None]
            high_folded *= (1 / query_unit)[:, None]
            low_parts = half_parts(low_folded, OWN.columns, rows, half, dtype)
            high_parts = half_parts(high_folded, OWN.columns, rows, half, dtype)
            low_parts = _by_chunk(low_parts, chunks, columns, half)
            high_parts = _by_chunk(high_parts, chunks, columns, half)
            products = tl.dot(low, low_parts, input_precision="ieee")
            products = tl.dot(high, high_parts, products, input_precision="ieee")
            weight = tl.where(tl.arange(0, columns) % OWN.columns == 0, 1.0, 1 / 2048)
            weighted = tl.reshape(products * weight, (block, PADDED, OWN.columns))
            of_codes = tl.sum(weighted, axis=2)
        else:
            low, high = anchor_fractions(anchor_bytes, table, instructions, INTERPRETED)
            low_parts = query_digits(low_folded, query_unit, OWN.digits, OWN.columns, rows, half)
            high_parts = query_digits(high_folded, query_unit, OWN.digits, OWN.columns, rows, half)
            low_parts = _by_chunk(low_parts, chunks, columns, half)
            high_parts = _by_chunk(high_parts, chunks, columns, half)
            products = tl.dot(low, low_parts, out_dtype=tl.int32)
            products = tl.dot(high, high_parts, products, out_dtype=tl.int32)
            products = tl.reshape(products, (block, columns))
            of_codes = sum_of_digits(products, OWN.digits, OWN.columns, PADDED, block)
            head_unit *= anchor_unit
        of_codes = tl.reshape(of_codes * head_unit[None, :], (chunks, OWN.chunk, PADDED))
        rest = tl.sum(low_rest + high_rest, axis=2)
        logit = tl.reshape(of_codes + rest[:, None, :], (block, PADDED))
        token = first + tl.arange(0, block)
        store_logits(logit, token, token < coded_stop, logits, PADDED)


FORMAT = Format(_encode, _gather, _logits, _encoding, _scoring, keys_as_values=True)

encode_groups = partial(coded.encode_groups, FORMAT)
gather_codes = partial(coded.gather_codes, FORMAT)
score_codes = partial(coded.score_codes, FORMAT)
