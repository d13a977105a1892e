"""QuantSpec codes on a GPU, Triton; coded/reference.py says what each launch does.

The scale of a channel is the same for a whole group of keys, so that it is multiplied with the
query, once a group, and the query with the codes themselves, as integers of 8 bits:

    q·k = Σ (q S) code + Σ q Z

With the upper nibble alone a code is that nibble. With both, one byte takes 16 upper + lower - 120,
which is 16 / S times what the decoded key has above Z, less 120.
"""

from __future__ import annotations

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
    nearest_integers,
    note_not_finite,
    power_below,
    query_digits,
    quotient,
    store_gathered,
    sum_of_digits,
    tokens_to_gather,
)
from cache_rank_kernels.nibbles.triton import high_nibbles, low_nibbles, pack_nibbles, signed
from cache_rank_kernels.quantspec.reference import QuantSpecCodec
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

_RING_BLOCK = 64


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
    _encode[encode_grid(tokens, slots, count, layers, shipment)](
        *tokens.planes,
        *tokens.rings,
        shipment,
        page_table,
        slots,
        starts,
        tokens.resident,
        tokens.not_finite,
        layers.start,
        count,
        page_table.stride(0),
        **layout_constants(tokens),
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
        first_layer,
        page_table.stride(0),
        torch.finfo(tokens.rings[0].dtype).max,
        **sharing,
        **layout_constants(tokens),
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
    warps: int = 4,
    stages: int = 3,
) -> None:
    """See the reference. One launch; D is a power of two, on a GPU of at least 64.

    Queries are rounded to 8 `digits` - 2 bits, 2 or 3 digits; see `query_digits`.
    """
    codec, key_ring = tokens.codecs[0], tokens.rings[0]
    assert isinstance(codec, QuantSpecCodec)
    _score[score_grid(out)](
        queries,
        tokens.planes[0],
        key_ring,
        page_table,
        slots,
        positions,
        *workspace,
        out,
        first_layer,
        scale,
        page_table.stride(0),
        out.shape[-1],
        **{**layout_constants(tokens), **score_constants(queries, workspace, out)},
        RING_BLOCK=_RING_BLOCK,
        STAGES=stages,
        BITS=codec.bits(exact),
        DIGITS=digits,
        COLUMNS=digit_columns(queries, out, digits),
        EXACT=multiplies_float32(key_ring),
        INTERPRETED=not key_ring.is_cuda,
        num_warps=warps,
    )


@triton.jit
def _nibbles(exact, scale, zero):
    """Upper and lower codes, float32 like `exact`, by the formulas of the reference."""
    offset = exact - zero
    upper = tl.clamp(nearest_integers(quotient(offset, scale)), 0.0, 15.0)
    lower = quotient(offset - scale * upper, scale * 0.0625)
    return upper, tl.clamp(nearest_integers(lower), -8.0, 7.0)


@triton.jit
def _stored_scale(largest, zero, dtype: tl.constexpr):
    return tl.div_rn(largest - zero, 15.0).to(dtype)


@triton.jit
def _encode_group(
    low,
    high,
    group,
    planes,
    PER_CHANNEL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
):
    """Write the codes of a group from its two halves of channels; whether each scale is finite."""
    upper, lower, scales, zeros = planes
    half: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = scales.dtype.element_ty
    dims = tl.arange(0, half)
    token = group * GROUP_TOKENS + tl.arange(0, GROUP_TOKENS)
    if PER_CHANNEL:
        low_zero, high_zero = tl.min(low, axis=0), tl.min(high, axis=0)
        low_stored = _stored_scale(tl.max(low, axis=0), low_zero, dtype)
        high_stored = _stored_scale(tl.max(high, axis=0), high_zero, dtype)
        low_at = group * HEAD_DIM + dims
        tl.store(scales + low_at, low_stored)
        tl.store(zeros + low_at, low_zero.to(dtype))
        tl.store(scales + low_at + half, high_stored)
        tl.store(zeros + low_at + half, high_zero.to(dtype))
        low_scale, high_scale = low_stored.to(tl.float32), high_stored.to(tl.float32)
        finite = is_finite(low_scale) & is_finite(high_scale)
        low_upper, low_lower = _nibbles(low, low_scale[None, :], low_zero[None, :])
        high_upper, high_lower = _nibbles(high, high_scale[None, :], high_zero[None, :])
    else:
        zero = tl.minimum(tl.min(low, axis=1), tl.min(high, axis=1))
        largest = tl.maximum(tl.max(low, axis=1), tl.max(high, axis=1))
        stored = _stored_scale(largest, zero, dtype)
        tl.store(scales + token, stored)
        tl.store(zeros + token, zero.to(dtype))
        scale = stored.to(tl.float32)
        finite = is_finite(scale)
        low_upper, low_lower = _nibbles(low, scale[:, None], zero[:, None])
        high_upper, high_lower = _nibbles(high, scale[:, None], zero[:, None])
    at = token[:, None] * half + dims[None, :]
    tl.store(upper + at, pack_nibbles(low_upper.to(tl.int32), high_upper.to(tl.int32)))
    tl.store(lower + at, pack_nibbles(low_lower.to(tl.int32), high_lower.to(tl.int32)))
    return finite


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
    first_layer,
    count,
    page_stride,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
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
    for is_values in tl.static_range(2):
        if part == is_values:
            ring = value_ring if is_values else key_ring
            planes = value_planes if is_values else key_planes
            dims = tl.arange(0, HEAD_DIM // 2)
            low = load_group(
                ring,
                shipment,
                is_values,
                start,
                first,
                ring_unit,
                count,
                dims,
                POOL_LAYERS,
                KV_HEADS,
                HEAD_DIM,
                RING,
                GROUP_TOKENS,
            )
            high = load_group(
                ring,
                shipment,
                is_values,
                start,
                first,
                ring_unit,
                count,
                dims + HEAD_DIM // 2,
                POOL_LAYERS,
                KV_HEADS,
                HEAD_DIM,
                RING,
                GROUP_TOKENS,
            )
            of_scales = _encode_group(
                low,
                high,
                group,
                planes,
                is_values == 0,
                HEAD_DIM,
                GROUP_TOKENS,
            )
            of_tokens = tl.min((is_finite(low) & is_finite(high)).to(tl.int32))
            finite = of_scales & (of_tokens > 0)
            note_not_finite(not_finite, finite, is_values, ring_unit, POOL_LAYERS, KV_HEADS)


@triton.jit
def _decode_half(upper, lower, scale, zero, IS_HIGH: tl.constexpr):
    """Half of the channels of tokens from bytes of nibbles, (n, D / 2) float32."""
    if IS_HIGH:
        upper, lower = upper >> 4, lower >> 4
    else:
        upper, lower = upper & 15, lower & 15
    offset = scale * upper.to(tl.float32) + scale * 0.0625 * signed(lower.to(tl.int32))
    return offset + zero


@triton.jit
def _gather_part(
    planes,
    ring,
    out,
    target,
    used,
    is_coded,
    token,
    in_ring,
    largest,
    PER_CHANNEL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
):
    """Read keys, or values, into the message."""
    upper, lower, scales, zeros = planes
    half: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, half)
    mask = is_coded[:, None]
    at = token[:, None] * half + dims[None, :]
    uppers = tl.load(upper + at, mask=mask, other=0)
    lowers = tl.load(lower + at, mask=mask, other=0)
    for is_high in tl.static_range(2):
        if PER_CHANNEL:
            channel = (token // GROUP_TOKENS)[:, None] * HEAD_DIM + is_high * half + dims[None, :]
            scale = tl.load(scales + channel, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(zeros + channel, mask=mask, other=0.0).to(tl.float32)
        else:
            scale = tl.load(scales + token, mask=is_coded, other=0.0).to(tl.float32)[:, None]
            zero = tl.load(zeros + token, mask=is_coded, other=0.0).to(tl.float32)[:, None]
        decoded = _decode_half(uppers, lowers, scale, zero, is_high)
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
        target,
        used,
        is_coded,
        token,
        in_ring,
        largest,
        True,
        HEAD_DIM,
        GROUP_TOKENS,
    )
    _gather_part(
        value_planes,
        value_ring,
        out_values,
        target,
        used,
        is_coded,
        token,
        in_ring,
        largest,
        False,
        HEAD_DIM,
        GROUP_TOKENS,
    )


@triton.jit
def _both_nibbles(upper, lower, IS_HIGH: tl.constexpr, INTERPRETED: tl.constexpr):
    """16 upper + lower - 120 of the low or high nibbles of bytes: int8 of the same shape.

    The byte of both nibbles, with the top bit of each flipped. Four bytes take three instructions;
    0xE4 takes bits of the first operand where the third has ones, else of the second.
    """
    if INTERPRETED:
        in_place = (upper & 0xF0) | (lower >> 4) if IS_HIGH else ((upper & 15) << 4) | (lower & 15)
        return (in_place ^ 0x88).to(tl.int8, bitcast=True)
    elif IS_HIGH:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            shr.b32 t, $2, 4;
            lop3.b32 t, $1, t, 0xF0F0F0F0, 0xE4;
            xor.b32 $0, t, 0x88888888; }""",
            "=r,r,r",
            [upper, lower],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t;
            shl.b32 t, $1, 4;
            lop3.b32 t, t, $2, 0xF0F0F0F0, 0xE4;
            xor.b32 $0, t, 0x88888888; }""",
            "=r,r,r",
            [upper, lower],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )


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
    first_layer,
    scale,
    page_stride,
    capacity,
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
    RING_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
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
        upper, lower, scales, zeros = key_planes
        layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
        unit_queries = queries + unit * GROUP * HEAD_DIM
        unit_logits = logits + unit * capacity * PADDED
        low_query = load_query_half(unit_queries, 0, scale, GROUP, PADDED, HEAD_DIM)
        high_query = load_query_half(unit_queries, 1, scale, GROUP, PADDED, HEAD_DIM)
        dims = tl.arange(0, half)
        stop = tl.minimum(start + CHUNK, tokens)
        coded = tl.minimum(coded_tokens(tokens, GROUP_TOKENS, RING), stop)
        # Stages of the loop, unlike those of a launch, bring the zeros ahead too.
        for first in tl.range(start, coded, GROUP_TOKENS, num_stages=STAGES):
            page = tl.load(page_table + row * page_stride + first // PAGE).to(tl.int64)
            tile = (page * POOL_LAYERS + layer) * KV_HEADS + head
            group = tile * (PAGE // GROUP_TOKENS) + first % PAGE // GROUP_TOKENS
            channel = group * HEAD_DIM + dims
            low_folded = low_query * tl.load(scales + channel).to(tl.float32)[None, :]
            high_folded = high_query * tl.load(scales + channel + half).to(tl.float32)[None, :]
            low_rest = low_query * tl.load(zeros + channel).to(tl.float32)[None, :]
            high_rest = high_query * tl.load(zeros + channel + half).to(tl.float32)[None, :]
            query_unit = power_below(
                tl.max(tl.maximum(tl.abs(low_folded), tl.abs(high_folded)), axis=1)
            )
            low_digits = query_digits(low_folded, query_unit, DIGITS, COLUMNS, PADDED, half)
            high_digits = query_digits(high_folded, query_unit, DIGITS, COLUMNS, PADDED, half)

            token = tl.arange(0, GROUP_TOKENS)
            at = group * GROUP_TOKENS * half + token[:, None] * half + dims[None, :]
            uppers = tl.load(upper + at)
            if BITS == 8:
                lowers = tl.load(lower + at)
                low_codes = _both_nibbles(uppers, lowers, False, INTERPRETED)
                high_codes = _both_nibbles(uppers, lowers, True, INTERPRETED)
                rest = tl.sum(low_rest + high_rest + 7.5 * (low_folded + high_folded), axis=1)
            else:
                low_codes = low_nibbles(uppers, INTERPRETED)
                high_codes = high_nibbles(uppers, INTERPRETED)
                rest = tl.sum(low_rest + high_rest, axis=1)
            products = tl.dot(low_codes, tl.trans(low_digits), out_dtype=tl.int32)
            products = tl.dot(high_codes, tl.trans(high_digits), products, out_dtype=tl.int32)
            of_codes = sum_of_digits(products, DIGITS, COLUMNS, PADDED, GROUP_TOKENS)
            code_unit = query_unit * (0.0625 if BITS == 8 else 1.0)
            logit = of_codes * code_unit[None, :] + rest[None, :]
            store_logits(logit, first + token, first + token < stop, unit_logits, PADDED)
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
