"""Lynx codes on a GPU, Triton; coded/reference.py says what each launch does.

A channel's minimum and span hold for a page and its mean and spread for a chunk, so that they are
multiplied with the query, once a chunk, and the query with the signed fractions alone:

    q·k = Σ (q span spread) f + Σ q (minimum + span mean)

An anchor alone has 16 fractions. They are rounded to integers of 8 bits, and looked up four at a
time: with α = 3 that is off by a twentieth of the step between two anchors at most. With the
residual there are 241, which are computed, in half precision; and so are those of anchors when α is
so large that the smallest would be rounded away.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from cache_rank_kernels.coded.reference import CodedTokens
from cache_rank_kernels.coded.triton import (
    coded_tokens,
    digit_columns,
    encode_grid,
    gather_arguments,
    group_to_encode,
    is_finite,
    layout_constants,
    load_group,
    load_query_half,
    note_not_finite,
    power_below,
    query_digits,
    quotient,
    store_gathered,
    sum_of_digits,
    tokens_to_gather,
)
from cache_rank_kernels.lynx.reference import (
    CHUNK,
    LEVELS,
    LynxCodec,
    boundaries_of_levels,
    fraction_of,
    fractions_of_levels,
)
from cache_rank_kernels.nibbles.triton import pack_nibbles
from cache_rank_kernels.score.reference import ScoreWorkspace
from cache_rank_kernels.score.triton import (
    finish_unit,
    multiplies_float32,
    score_constants,
    score_full_precision,
    score_grid,
    store_logits,
)
from torch import Tensor

_ENCODED_CHANNELS = 16
"""Of each half that are encoded at once: as many as registers hold pages of."""

_RING_BLOCK = 64
_LARGEST_ANCHOR = 127

_LEAST_ANCHOR = 4
"""As an integer, of the smallest anchor but 0; below that rounding is off by more than an eighth of
the step between two."""


def encode_groups(
    tokens: CodedTokens,
    page_table: Tensor,
    slots: Tensor,
    starts: Tensor,
    count: int,
    layers: range,
    shipment: Tensor | None = None,
    warps: int = 8,
) -> None:
    """See the reference. One launch; D is a power of two."""
    head_dim = tokens.rings[0].shape[-1]
    _encode[encode_grid(tokens, slots, count, layers, shipment)](
        *tokens.planes,
        *tokens.rings,
        shipment,
        page_table,
        slots,
        starts,
        tokens.resident,
        tokens.not_finite,
        _padded_boundaries(_codec(tokens).alpha, slots.device),
        layers.start,
        count,
        page_table.stride(0),
        **layout_constants(tokens),
        CHUNK=CHUNK,
        CHANNELS=min(_ENCODED_CHANNELS, head_dim // 2),
        num_warps=warps,
        enable_fp_fusion=False,  # the same bits as the reference
    )


def gather_codes(
    tokens: CodedTokens,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    entering: Tensor,
    out_keys: Tensor,
    out_values: Tensor,
) -> None:
    """See the reference. One launch; D is a power of two."""
    grid, sharing = gather_arguments(entering, out_keys, out_values)
    _gather[grid](
        *tokens.planes,
        *tokens.rings,
        page_table,
        slots,
        positions,
        entering,
        out_keys,
        out_values,
        fractions_of_levels(_codec(tokens).alpha, slots.device),
        first_layer,
        page_table.stride(0),
        torch.finfo(tokens.rings[0].dtype).max,
        **sharing,
        **layout_constants(tokens),
        CHUNK=CHUNK,
        enable_fp_fusion=False,
    )


def score_codes(
    tokens: CodedTokens,
    queries: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    scale: float,
    workspace: ScoreWorkspace,
    out: Tensor,
    exact: bool = False,
    digits: int = 2,
    chunks: int = 4,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """See the reference. One launch; D is a power of two, on a GPU of at least 64.

    For anchors, queries are rounded to 8 `digits` - 2 bits, 2 or 3 digits; see `query_digits`.
    A block is of `chunks` chunks, with one of which a warp deals when there are as many warps.
    """
    codec, key_ring = _codec(tokens), tokens.rings[0]
    _score[score_grid(out)](
        queries,
        tokens.planes[0],
        key_ring,
        page_table,
        slots,
        positions,
        *workspace,
        out,
        _anchor_table(codec.alpha, slots.device),
        first_layer,
        scale,
        page_table.stride(0),
        out.shape[-1],
        math.log2(1 + codec.alpha) / LEVELS,
        1 / codec.alpha,
        _largest_fraction(codec.alpha) / _LARGEST_ANCHOR,
        **{**layout_constants(tokens), **score_constants(queries, workspace, out)},
        CHUNK_OF_PAGE=CHUNK,
        CHUNKS=chunks,
        RING_BLOCK=_RING_BLOCK,
        STAGES=stages,
        IN_FULL=codec.reads_in_full(exact),
        AS_INTEGERS=_anchor_magnitudes(codec.alpha)[1] >= _LEAST_ANCHOR,
        LOOK_UP=_anchor_instructions(codec.alpha),
        DIGITS=digits,
        COLUMNS=digit_columns(queries, out, digits),
        EXACT=multiplies_float32(key_ring),
        INTERPRETED=not key_ring.is_cuda,
        num_warps=warps,
    )


def _codec(tokens: CodedTokens) -> LynxCodec:
    """Of keys and of values."""
    codec = tokens.codecs[0]
    assert isinstance(codec, LynxCodec)
    return codec


@functools.lru_cache(maxsize=16)
def _padded_boundaries(alpha: float, device: torch.device) -> Tensor:
    """(128,) float32: `boundaries_of_levels`, and infinities."""
    boundaries = boundaries_of_levels(alpha, device)
    return torch.nn.functional.pad(boundaries, (0, 128 - LEVELS), value=float("inf"))


def _largest_fraction(alpha: float) -> float:
    return fraction_of(7 * 16, alpha)


def _anchor_magnitudes(alpha: float) -> list[int]:
    """Of anchors 0 to 7, the fraction as an integer."""
    unit = _largest_fraction(alpha) / _LARGEST_ANCHOR
    return [round(fraction_of(16 * anchor, alpha) / unit) for anchor in range(8)]


@functools.lru_cache(maxsize=16)
def _anchor_table(alpha: float, device: torch.device) -> Tensor:
    """(16,) int8: the signed fraction of each nibble, as an integer."""
    magnitudes = _anchor_magnitudes(alpha)
    signed = magnitudes + [-magnitude for magnitude in reversed(magnitudes)]
    return torch.tensor(signed, dtype=torch.int8, device=device)


@functools.lru_cache(maxsize=16)
def _anchor_instructions(alpha: float) -> str:
    """Instructions that look four bytes of anchors up: their low nibbles, and their high ones.

    `prmt` takes four of eight bytes, by the low three bits of four nibbles; with the fourth bit it
    repeats a byte's sign instead, which makes masks. 0xE4 takes bits of the first operand where the
    third has ones, else of the second. Of the last two words, one has the bytes of the low nibbles
    in places 0, 2, 4 and 6, and the other those of the high ones between them.
    """
    magnitudes = _anchor_magnitudes(alpha)
    words = []
    for table in (magnitudes, [-magnitude for magnitude in reversed(magnitudes)]):
        for half in (table[:4], table[4:]):
            words.append(sum((number & 255) << 8 * place for place, number in enumerate(half)))
    positive, negative = (f"0x{low:08x}, 0x{high:08x}" for low, high in (words[:2], words[2:]))
    look_up = f"""
        prmt.b32 plus, {positive}, magnitude;
        prmt.b32 minus, {negative}, magnitude;
        prmt.b32 mask, 0x8000, 0, sign;
        lop3.b32 {{found}}, minus, plus, mask, 0xE4;"""
    return f"""{{
        .reg .b32 magnitude, sign, shifted, plus, minus, mask, first, second;
        and.b32 magnitude, $2, 0x77777777;
        and.b32 sign, $2, 0x88888888;
        shr.b32 shifted, sign, 3;
        or.b32 sign, sign, shifted;{look_up.format(found="first")}
        shr.b32 magnitude, magnitude, 16;
        shr.b32 sign, sign, 16;{look_up.format(found="second")}
        prmt.b32 $0, first, second, 0x6420;
        prmt.b32 $1, first, second, 0x7531;
    }}"""


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
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Encode some channels of a page, (PAGE, CHANNELS) float32, but for writing nibbles.

    Returns:
        (PAGE, CHANNELS) int32 anchors and residuals, and whether each channel's span is finite.
    """
    _, _, minimums, spans, means, spreads = planes
    count: tl.constexpr = PAGE // CHUNK
    channel = first_channel + tl.arange(0, CHANNELS)
    minimum = tl.min(page, axis=0)
    span = tl.max(page, axis=0) - minimum
    tl.store(minimums + group * HEAD_DIM + channel, minimum)
    tl.store(spans + group * HEAD_DIM + channel, span)
    normalized = quotient(page - minimum[None, :], span[None, :])
    chunks = tl.reshape(normalized, (count, CHUNK, CHANNELS))
    mean = (_sum_of_chunks(chunks, count, CHUNK, CHANNELS) * (1 / CHUNK)).to(tl.float16)
    centred = chunks - mean.to(tl.float32)[:, None, :]
    spread = tl.max(tl.abs(centred), axis=1).to(tl.float16)
    at = (group * count + tl.arange(0, count))[:, None] * HEAD_DIM + channel[None, :]
    tl.store(means + at, mean)
    tl.store(spreads + at, spread)
    level = _level_of(quotient(tl.abs(centred), spread.to(tl.float32)[:, None, :]), boundaries)
    magnitude = (level + 7) >> 4
    anchor = tl.where(centred < 0.0, -magnitude - 1, magnitude)
    residual = 16 * magnitude - level
    shape: tl.constexpr = (PAGE, CHANNELS)
    return tl.reshape(anchor, shape), tl.reshape(residual, shape), is_finite(span)


@triton.jit(
    do_not_specialize=["first_layer", "count", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "starts"],
)
def _encode(
    key_planes,
    value_planes,
    key_ring,
    value_ring,
    shipment,
    page_table,
    slots,
    starts,
    resident,
    not_finite,
    boundaries,
    first_layer,
    count,
    page_stride,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    exists, part, start, first, group, ring_unit = group_to_encode(
        page_table,
        slots,
        starts,
        page_stride,
        resident,
        first_layer,
        count,
        POOL_LAYERS,
        KV_HEADS,
        PAGE,
        RING,
        GROUP_TOKENS,
    )
    if not exists:
        return
    half: tl.constexpr = HEAD_DIM // 2
    if part == 0:
        ring, planes = key_ring, key_planes
    else:
        ring, planes = value_ring, value_planes
    anchors, residuals = planes[0], planes[1]
    for slice_start in range(0, half, CHANNELS):
        low_channel, high_channel = slice_start, slice_start + half
        low = load_group(
            ring,
            shipment,
            part,
            start,
            first,
            ring_unit,
            count,
            low_channel + tl.arange(0, CHANNELS),
            POOL_LAYERS,
            KV_HEADS,
            HEAD_DIM,
            RING,
            GROUP_TOKENS,
        )
        high = load_group(
            ring,
            shipment,
            part,
            start,
            first,
            ring_unit,
            count,
            high_channel + tl.arange(0, CHANNELS),
            POOL_LAYERS,
            KV_HEADS,
            HEAD_DIM,
            RING,
            GROUP_TOKENS,
        )
        low_anchor, low_residual, low_finite = _encode_channels(
            low,
            low_channel,
            group,
            planes,
            boundaries,
            HEAD_DIM,
            GROUP_TOKENS,
            CHUNK,
            CHANNELS,
        )
        high_anchor, high_residual, high_finite = _encode_channels(
            high,
            high_channel,
            group,
            planes,
            boundaries,
            HEAD_DIM,
            GROUP_TOKENS,
            CHUNK,
            CHANNELS,
        )
        token = group * GROUP_TOKENS + tl.arange(0, GROUP_TOKENS)
        at = token[:, None] * half + low_channel + tl.arange(0, CHANNELS)[None, :]
        tl.store(anchors + at, pack_nibbles(low_anchor, high_anchor))
        tl.store(residuals + at, pack_nibbles(low_residual, high_residual))
        of_tokens = tl.min((is_finite(low) & is_finite(high)).to(tl.int32))
        finite = low_finite & high_finite & (of_tokens > 0)
        note_not_finite(not_finite, finite, part, ring_unit, POOL_LAYERS, KV_HEADS)


@triton.jit
def _magnitude_of(anchor):
    """V of signed anchors."""
    return tl.where(anchor < 0, -anchor - 1, anchor)


@triton.jit
def _gather_part(
    planes,
    ring,
    out,
    fractions,
    target,
    used,
    is_coded,
    token,
    in_ring,
    largest,
    HEAD_DIM: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Read keys, or values, into the message."""
    anchors, residuals, minimums, spans, means, spreads = planes
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, half)
    mask = is_coded[:, None]
    at = token[:, None] * half + dims[None, :]
    anchor_bytes = tl.load(anchors + at, mask=mask, other=0).to(tl.int32)
    residual_bytes = tl.load(residuals + at, mask=mask, other=0).to(tl.int32)
    for is_high in tl.static_range(2):
        channel = dims[None, :] + is_high * half
        anchor = (((anchor_bytes >> 4 * is_high) & 15) ^ 8) - 8
        residual = (((residual_bytes >> 4 * is_high) & 15) ^ 8) - 8
        level = 16 * _magnitude_of(anchor) - residual
        fraction = tl.load(fractions + level, mask=mask, other=0.0)
        fraction = tl.where(anchor < 0, -fraction, fraction)
        of_page = (token // GROUP_TOKENS)[:, None] * HEAD_DIM + channel
        of_chunk = (token // CHUNK)[:, None] * HEAD_DIM + channel
        minimum = tl.load(minimums + of_page, mask=mask, other=0.0)
        span = tl.load(spans + of_page, mask=mask, other=0.0)
        mean = tl.load(means + of_chunk, mask=mask, other=0.0).to(tl.float32)
        spread = tl.load(spreads + of_chunk, mask=mask, other=0.0).to(tl.float32)
        decoded = minimum + span * (mean + spread * fraction)
        store_gathered(
            out,
            decoded,
            ring,
            target,
            used,
            is_coded,
            in_ring,
            dims + is_high * half,
            largest,
            HEAD_DIM,
        )


@triton.jit(
    do_not_specialize=["first_layer", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions", "entering"],
)
def _gather(
    key_planes,
    value_planes,
    key_ring,
    value_ring,
    page_table,
    slots,
    positions,
    entering,
    out_keys,
    out_values,
    fractions,
    first_layer,
    page_stride,
    largest,
    LAYERS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    target, used, is_coded, token, in_ring = tokens_to_gather(
        page_table,
        slots,
        positions,
        entering,
        first_layer,
        page_stride,
        LAYERS,
        CAPACITY,
        BLOCK,
        POOL_LAYERS,
        KV_HEADS,
        PAGE,
        RING,
        GROUP_TOKENS,
    )
    _gather_part(
        key_planes,
        key_ring,
        out_keys,
        fractions,
        target,
        used,
        is_coded,
        token,
        in_ring,
        largest,
        HEAD_DIM,
        GROUP_TOKENS,
        CHUNK,
    )
    _gather_part(
        value_planes,
        value_ring,
        out_values,
        fractions,
        target,
        used,
        is_coded,
        token,
        in_ring,
        largest,
        HEAD_DIM,
        GROUP_TOKENS,
        CHUNK,
    )


@triton.jit
def _anchor_fractions(anchors, table, LOOK_UP: tl.constexpr, INTERPRETED: tl.constexpr):
    """Signed fractions of the low and of the high nibbles, as integers: int8 like `anchors`."""
    if INTERPRETED:
        low = tl.load(table + (anchors & 15).to(tl.int32))
        return low, tl.load(table + (anchors >> 4).to(tl.int32))
    else:
        return tl.inline_asm_elementwise(
            LOOK_UP, "=r,=r,r", [anchors], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )


@triton.jit
def _signed_levels(anchors, residuals, INTERPRETED: tl.constexpr):
    """Level + 1 of the low and of the high nibbles, negative where they are: int8 like `anchors`.

    On a GPU four bytes at a time: no byte of a sum or a difference leaves [0, 255].
    """
    if INTERPRETED:
        low = _signed_level((anchors & 15).to(tl.int32), (residuals & 15).to(tl.int32))
        return low, _signed_level((anchors >> 4).to(tl.int32), (residuals >> 4).to(tl.int32))
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 ones, flip, anchor, residual, mask, low, high;
            and.b32 ones, $2, 0x88888888;
            shr.b32 mask, ones, 3;
            sub.u32 flip, ones, mask;
            and.b32 anchor, $2, 0x77777777;
            xor.b32 anchor, anchor, flip;
            xor.b32 residual, $3, 0x88888888;
            and.b32 ones, mask, 0x01010101;
            and.b32 low, anchor, 0x07070707;
            shl.b32 low, low, 4;
            add.u32 low, low, 0x09090909;
            and.b32 flip, residual, 0x0F0F0F0F;
            sub.u32 low, low, flip;
            mul.lo.u32 flip, ones, 255;
            xor.b32 low, low, flip;
            shr.b32 mask, mask, 4;
            and.b32 mask, mask, 0x01010101;
            and.b32 high, anchor, 0x70707070;
            add.u32 high, high, 0x09090909;
            shr.b32 residual, residual, 4;
            and.b32 residual, residual, 0x0F0F0F0F;
            sub.u32 high, high, residual;
            mul.lo.u32 flip, mask, 255;
            xor.b32 high, high, flip;
            add.u32 $0, low, ones;
            add.u32 $1, high, mask; }""",
            "=r,=r,r,r",
            [anchors, residuals],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _signed_level(anchor, residual):
    """Level + 1 of nibbles, int32, negative where the anchor is: int8."""
    anchor, residual = (anchor ^ 8) - 8, (residual ^ 8) - 8
    level = 16 * _magnitude_of(anchor) - residual + 1
    return tl.where(anchor < 0, -level, level).to(tl.int8)


@triton.jit
def _full_fractions(
    signed_levels, log2_step, inverse_alpha, dtype: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Signed fractions of `_signed_levels`, in a float dtype."""
    signed = signed_levels.to(tl.float32)
    exponent = tl.abs(signed) * log2_step - log2_step
    if INTERPRETED:
        power = tl.exp2(exponent)
    else:  # exponents are not negative: without the care for powers that float32 cannot hold
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )
    fraction = power * inverse_alpha - inverse_alpha
    sign = signed.to(tl.int32, bitcast=True) & -0x80000000
    return (fraction.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def _half_parts(query, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, dtype):
    """Float queries below 2 as sums of two numbers of a float dtype, the second in 2048ths.

    Returns:
        (ROWS * COLUMNS, HALF): of a row its two numbers, and zeros.
    """
    first = query.to(dtype)
    second = ((query - first.to(tl.float32)) * 2048.0).to(dtype)
    column = tl.arange(0, COLUMNS)[None, :, None]
    part = tl.where(column == 0, first[:, None, :], second[:, None, :])
    part = tl.where(column < 2, part, 0.0).to(dtype)
    return tl.reshape(part, (ROWS * COLUMNS, HALF))


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


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "capacity"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _score(
    queries,
    key_planes,
    key_ring,
    page_table,
    slots,
    positions,
    logits,
    partial,
    arrived,
    out,
    anchor_table,
    first_layer,
    scale,
    page_stride,
    capacity,
    log2_step,
    inverse_alpha,
    anchor_unit,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    LAYERS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FINISH_BLOCK: tl.constexpr,
    CHUNK_OF_PAGE: tl.constexpr,
    CHUNKS: tl.constexpr,
    RING_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    IN_FULL: tl.constexpr,
    AS_INTEGERS: tl.constexpr,
    LOOK_UP: tl.constexpr,
    DIGITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    slot = tl.load(slots + row).to(tl.int64)
    tokens = tl.load(positions + row) + 1
    start = chunk * CHUNK
    if (slot >= 0) & (start < tokens):
        half: tl.constexpr = HEAD_DIM // 2
        block: tl.constexpr = CHUNKS * CHUNK_OF_PAGE
        rows: tl.constexpr = CHUNKS * PADDED
        layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
        unit_queries = queries + unit * GROUP * HEAD_DIM
        unit_logits = logits + unit * capacity * PADDED
        low_query = load_query_half(unit_queries, 0, scale, GROUP, PADDED, HEAD_DIM)
        high_query = load_query_half(unit_queries, 1, scale, GROUP, PADDED, HEAD_DIM)
        dims = tl.arange(0, half)
        stop = tl.minimum(start + CHUNK, tokens)
        coded = tl.minimum(coded_tokens(tokens, GROUP_TOKENS, RING), stop)
        for first in tl.range(start, coded, block, num_stages=STAGES):
            page = tl.load(page_table + row * page_stride + first // PAGE).to(tl.int64)
            tile = (page * POOL_LAYERS + layer) * KV_HEADS + head
            in_pool = tile * PAGE + first % PAGE
            page_at = in_pool // GROUP_TOKENS * HEAD_DIM
            chunk_at = (in_pool // CHUNK_OF_PAGE + tl.arange(0, CHUNKS)) * HEAD_DIM
            low_folded, low_rest, low_largest = _fold(
                low_query,
                dims,
                page_at,
                chunk_at,
                key_planes,
                CHUNKS,
                PADDED,
                half,
            )
            high_folded, high_rest, high_largest = _fold(
                high_query,
                dims + half,
                page_at,
                chunk_at,
                key_planes,
                CHUNKS,
                PADDED,
                half,
            )
            head_unit = power_below(tl.maximum(low_largest, high_largest))
            query_unit = tl.reshape(tl.broadcast_to(head_unit[None, :], (CHUNKS, PADDED)), (rows,))

            at_chunk = tl.arange(0, CHUNKS)[:, None, None] * CHUNK_OF_PAGE
            in_chunk = tl.arange(0, CHUNK_OF_PAGE)[None, :, None]
            at = (in_pool + at_chunk + in_chunk) * half + dims[None, None, :]
            anchor_bytes = tl.load(key_planes[0] + at)
            if IN_FULL or not AS_INTEGERS:
                dtype: tl.constexpr = tl.float32 if INTERPRETED else tl.float16
                if IN_FULL:
                    residual_bytes = tl.load(key_planes[1] + at)
                else:
                    residual_bytes = tl.zeros_like(anchor_bytes)
                low_levels, high_levels = _signed_levels(anchor_bytes, residual_bytes, INTERPRETED)
                low = _full_fractions(low_levels, log2_step, inverse_alpha, dtype, INTERPRETED)
                high = _full_fractions(high_levels, log2_step, inverse_alpha, dtype, INTERPRETED)
                low_folded *= (1 / query_unit)[:, None]
                high_folded *= (1 / query_unit)[:, None]
                low_parts = _half_parts(low_folded, COLUMNS, rows, half, dtype)
                high_parts = _half_parts(high_folded, COLUMNS, rows, half, dtype)
                products = tl.dot(
                    low,
                    _by_chunk(low_parts, CHUNKS, PADDED * COLUMNS, half),
                    input_precision="ieee",
                )
                products = tl.dot(
                    high,
                    _by_chunk(high_parts, CHUNKS, PADDED * COLUMNS, half),
                    products,
                    input_precision="ieee",
                )
                weight = tl.where(tl.arange(0, PADDED * COLUMNS) % COLUMNS == 0, 1.0, 1 / 2048)
                weighted = tl.reshape(products * weight, (block, PADDED, COLUMNS))
                of_codes = tl.sum(weighted, axis=2)
            else:
                low, high = _anchor_fractions(anchor_bytes, anchor_table, LOOK_UP, INTERPRETED)
                low_parts = query_digits(low_folded, query_unit, DIGITS, COLUMNS, rows, half)
                high_parts = query_digits(high_folded, query_unit, DIGITS, COLUMNS, rows, half)
                products = tl.dot(
                    low, _by_chunk(low_parts, CHUNKS, PADDED * COLUMNS, half), out_dtype=tl.int32
                )
                products = tl.dot(
                    high,
                    _by_chunk(high_parts, CHUNKS, PADDED * COLUMNS, half),
                    products,
                    out_dtype=tl.int32,
                )
                products = tl.reshape(products, (block, PADDED * COLUMNS))
                of_codes = sum_of_digits(products, DIGITS, COLUMNS, PADDED, block)
                head_unit *= anchor_unit
            of_codes = tl.reshape(of_codes * head_unit[None, :], (CHUNKS, CHUNK_OF_PAGE, PADDED))
            rest = tl.sum(low_rest + high_rest, axis=2)
            logit = tl.reshape(of_codes + rest[:, None, :], (block, PADDED))
            token = first + tl.arange(0, block)
            store_logits(logit, token, token < stop, unit_logits, PADDED)
        if coded < stop:
            score_full_precision(
                unit_queries,
                key_ring,
                slots + row,
                tl.maximum(coded, start),
                stop,
                layer,
                head,
                scale,
                POOL_LAYERS,
                unit_logits,
                KV_HEADS,
                GROUP,
                PADDED,
                PARTS,
                HEAD_DIM,
                RING,
                RING_BLOCK,
                True,
                1,  # few tokens: shared memory is for the codes
                EXACT,
                False,
            )
        finish_unit(
            chunk,
            tokens,
            unit_logits,
            partial + unit * tl.cdiv(capacity, CHUNK) * 2 * PADDED,
            arrived + unit,
            out + unit * capacity,
            GROUP,
            PADDED,
            CHUNK,
            MAX_CHUNKS,
            FINISH_BLOCK,
        )
