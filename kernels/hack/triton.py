"""HACK codes on a GPU, Triton; coded/reference.py says what each launch does.

Scores multiply codes with codes, as integers of 8 bits: those of keys, and those of queries less
128, which the sums of the keys' codes make up for. A column of the query operand is of one head and
one partition, and 0 outside of it, so that one product gives Σ a'b' of every head and partition.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from cache_rank_kernels.coded.reference import CodedTokens
from cache_rank_kernels.coded.triton import (
    coded_tokens,
    encode_grid,
    gather_arguments,
    group_to_encode,
    is_finite,
    layout_constants,
    load_group,
    nearest_integers,
    note_not_finite,
    quotient,
    store_gathered,
    tokens_to_gather,
)
from cache_rank_kernels.hack.reference import HackCodec
from cache_rank_kernels.nibbles.triton import high_nibbles, low_nibbles
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

_PRODUCTS = 4096
"""Of a block of keys with the columns of queries: what registers hold."""

_DECODED_BLOCK = 64


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
        *tokens.planes[0],
        *tokens.planes[1],
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
        **_code_constants(tokens),
        SEED=_codec(tokens).seed,
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
        *tokens.planes[0][:3],
        *tokens.planes[1][:3],
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
        **_code_constants(tokens),
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
    products: int = _PRODUCTS,
    columns: int = 8,
    warps: int = 4,
    stages: int = 3,
) -> None:
    """See the reference. One launch; D is a power of two.

    Keys of a block are multiplied with at least `columns` columns of queries, `products` at once.
    """
    key_ring = tokens.rings[0]
    shared, codes = score_constants(queries, workspace, out), _code_constants(tokens)
    head_dim = queries.shape[-1]
    partition = min(codes["PARTITION"], head_dim)
    columns = max(columns, shared["PADDED"] * (1 if exact else head_dim // partition))
    _score[score_grid(out)](
        queries,
        *tokens.planes[0],
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
        **{**layout_constants(tokens), **shared, **codes, "PARTITION": partition},
        COLUMNS=columns,
        # The matrix unit takes no fewer bytes of a token.
        BYTES=max(32, head_dim * codes["BITS"] // 8),
        BLOCK=_DECODED_BLOCK if exact else min(products // columns, tokens.page_tokens),
        STAGES=stages,
        DECODES=exact,
        EXACT=multiplies_float32(key_ring),
        INTERPRETED=not key_ring.is_cuda,
        num_warps=warps,
    )


def _codec(tokens: CodedTokens) -> HackCodec:
    codec = tokens.codecs[0]
    assert isinstance(codec, HackCodec)
    return codec


def _code_constants(tokens: CodedTokens) -> dict[str, Any]:
    codec, head_dim = _codec(tokens), tokens.rings[0].shape[-1]
    return {"BITS": codec.bits, "PARTITION": codec.partition, "WIDTH": head_dim * codec.bits // 8}


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
    minima,
    scales,
    sums,
    AXIS: tl.constexpr,
    BITS: tl.constexpr,
    SEED: tl.constexpr,
):
    """Codes of partitions along an axis; writes what they are relative to.

    Args:
        exact: three-dimensional float32.
        place: of each element in its partition, broadcast along the axis.
        at: where in the planes each partition has its entry; of size 1 along the axis.

    Returns:
        Codes, int32 like `exact`, and whether each stored scale is finite.
    """
    most: tl.constexpr = (1 << BITS) - 1
    minimum = tl.min(exact, axis=AXIS, keep_dims=True) + 0.0
    largest = tl.max(exact, axis=AXIS, keep_dims=True)
    stored = tl.div_rn(largest - minimum, most * 1.0).to(scales.dtype.element_ty)
    scale = stored.to(tl.float32)
    offset = quotient(exact - minimum, scale)
    if SEED is None:
        rounded = nearest_integers(offset)
    else:
        rounded = tl.floor(offset + _uniform(place, minimum, scale, exact, SEED))
    codes = tl.clamp(rounded, 0.0, most * 1.0).to(tl.int32)
    tl.store(minima + at, minimum.to(minima.dtype.element_ty))
    tl.store(scales + at, stored)
    tl.store(sums + at, tl.sum(codes, axis=AXIS, keep_dims=True).to(sums.dtype.element_ty))
    return codes, is_finite(scale)


@triton.jit
def _encode_group(
    exact,
    group,
    codes,
    minima,
    scales,
    sums,
    OF_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
    SEED: tl.constexpr,
):
    """Write the codes of a group, (GROUP_TOKENS, D) float32; whether each scale is finite."""
    token = group * GROUP_TOKENS + tl.arange(0, GROUP_TOKENS)
    member = tl.arange(0, PARTITION)
    if OF_KEYS:
        count: tl.constexpr = HEAD_DIM // PARTITION
        parts = tl.reshape(exact, (GROUP_TOKENS, count, PARTITION))
        place = member[None, None, :]
        at = (token[:, None] * count + tl.arange(0, count)[None, :])[:, :, None]
        found, finite = _encode_partitions(parts, place, at, minima, scales, sums, 2, BITS, SEED)
    else:
        stretches: tl.constexpr = GROUP_TOKENS // PARTITION
        parts = tl.reshape(exact, (stretches, PARTITION, HEAD_DIM))
        place = member[None, :, None]
        entry = group * stretches + tl.arange(0, stretches)
        at = entry[:, None, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, None, :]
        found, finite = _encode_partitions(parts, place, at, minima, scales, sums, 1, BITS, SEED)
    per_byte: tl.constexpr = 8 // BITS
    shifted = tl.reshape(found, (GROUP_TOKENS, per_byte, WIDTH))
    shifted = shifted << (BITS * tl.arange(0, per_byte))[None, :, None]
    packed = tl.sum(shifted, axis=1).to(tl.uint8)
    tl.store(codes + token[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], packed)
    return finite


@triton.jit(
    do_not_specialize=["first_layer", "count", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "starts"],
)
def _encode(
    key_codes,
    key_minima,
    key_scales,
    key_sums,
    value_codes,
    value_minima,
    value_scales,
    value_sums,
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
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
    SEED: tl.constexpr,
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
            exact = load_group(
                value_ring if is_values else key_ring,
                shipment,
                is_values,
                start,
                first,
                ring_unit,
                count,
                tl.arange(0, HEAD_DIM),
                POOL_LAYERS,
                KV_HEADS,
                HEAD_DIM,
                RING,
                GROUP_TOKENS,
            )
            of_scales = _encode_group(
                exact,
                group,
                value_codes if is_values else key_codes,
                value_minima if is_values else key_minima,
                value_scales if is_values else key_scales,
                value_sums if is_values else key_sums,
                is_values == 0,
                HEAD_DIM,
                GROUP_TOKENS,
                BITS,
                PARTITION if is_values else min(PARTITION, HEAD_DIM),
                WIDTH,
                SEED,
            )
            finite = of_scales & (tl.min(is_finite(exact).to(tl.int32)) > 0)
            note_not_finite(not_finite, finite, is_values, ring_unit, POOL_LAYERS, KV_HEADS)


@triton.jit
def _decode_channels(
    packed,
    minima,
    scales,
    token,
    mask,
    INDEX: tl.constexpr,
    OF_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Channels [INDEX · WIDTH, (INDEX + 1) · WIDTH) of tokens: (n, BYTES) float32.

    Args:
        packed: (n, BYTES) of which WIDTH are used.
        token: (n,) index among those of pages, (pages, layers, Hkv, P).
        mask: (n, BYTES) which are wanted.
    """
    channel = INDEX * WIDTH + tl.arange(0, BYTES)
    if OF_KEYS:
        count: tl.constexpr = HEAD_DIM // PARTITION
        at = token[:, None] * count + (channel // PARTITION)[None, :]
    else:
        at = (token // PARTITION)[:, None] * HEAD_DIM + channel[None, :]
    minimum = tl.load(minima + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
    code = (packed >> (INDEX * BITS)) & ((1 << BITS) - 1)
    return minimum + scale * code.to(tl.float32)


@triton.jit
def _gather_part(
    codes,
    minima,
    scales,
    ring,
    out,
    target,
    used,
    is_coded,
    token,
    in_ring,
    largest,
    OF_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Read keys, or values, into the message."""
    byte = tl.arange(0, WIDTH)
    mask = is_coded[:, None] & (byte < WIDTH)[None, :]
    packed = tl.load(codes + token[:, None] * WIDTH + byte[None, :], mask=mask, other=0)
    for index in tl.static_range(8 // BITS):
        decoded = _decode_channels(
            packed,
            minima,
            scales,
            token,
            mask,
            index,
            OF_KEYS,
            HEAD_DIM,
            BITS,
            PARTITION,
            WIDTH,
            WIDTH,
        )
        dims = index * WIDTH + byte
        store_gathered(out, decoded, ring, target, used, is_coded, in_ring, dims, largest, HEAD_DIM)


@triton.jit(
    do_not_specialize=["first_layer", "page_stride"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions", "entering"],
)
def _gather(
    key_codes,
    key_minima,
    key_scales,
    value_codes,
    value_minima,
    value_scales,
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
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
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
    for is_values in tl.static_range(2):
        _gather_part(
            value_codes if is_values else key_codes,
            value_minima if is_values else key_minima,
            value_scales if is_values else key_scales,
            value_ring if is_values else key_ring,
            out_values if is_values else out_keys,
            target,
            used,
            is_coded,
            token,
            in_ring,
            largest,
            is_values == 0,
            HEAD_DIM,
            BITS,
            PARTITION if is_values else min(PARTITION, HEAD_DIM),
            WIDTH,
        )


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
def _query_codes(query, minimum, scale):
    """8-bit codes of queries, float32 in [0, 255], by the formulas of the reference."""
    return tl.clamp(nearest_integers(tl.div_rn(query - minimum, scale)), 0.0, 255.0)


@triton.jit
def _query_ranges(
    unit_queries,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTITION: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Minimum, scale and sum of the codes of each column's partition: (COLUMNS,) float32.

    Column head · COUNT + z is of partition z; of heads and partitions that there are not, all is 0
    but the scale. A scale is 1 where all codes are 0, so that it can be divided by.
    """
    column = tl.arange(0, COLUMNS)
    head, index = column // COUNT, column % COUNT
    used = (head < GROUP) & (index < HEAD_DIM // PARTITION)
    at = (head * HEAD_DIM + index * PARTITION)[:, None] + tl.arange(0, PARTITION)[None, :]
    query = tl.load(unit_queries + at, mask=used[:, None], other=0.0)
    minimum = tl.min(query, axis=1)
    scale = tl.div_rn(tl.max(query, axis=1) - minimum, 255.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return minimum, scale, tl.sum(_query_codes(query, minimum[:, None], scale[:, None]), axis=1)


@triton.jit
def _query_operand(
    unit_queries,
    minimum,
    scale,
    INDEX: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """What the codes `_codes(packed, INDEX)` are multiplied with: (BYTES, COLUMNS) int8.

    The queries' codes less 128, and 0 where a channel is not of the column's partition.
    """
    byte, column = tl.arange(0, BYTES)[:, None], tl.arange(0, COLUMNS)[None, :]
    channel, head = INDEX * WIDTH + byte, column // COUNT
    used = (byte < WIDTH) & (head < GROUP) & (channel // PARTITION == column % COUNT)
    query = tl.load(unit_queries + head * HEAD_DIM + channel, mask=used, other=0.0)
    codes = _query_codes(query, minimum[None, :], scale[None, :])
    return tl.where(used, codes - 128.0, 0.0).to(tl.int32).to(tl.int8)


@triton.jit
def _query_operands(
    unit_queries,
    logit_scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """What `_logits_on_codes` multiplies keys with.

    Returns:
        `_query_operand` of each code of a byte; and factors, (1, PADDED, COLUMNS / PADDED) each,
        of Eq. 4 divided by s_q, gathered by what a key brings:

            s_q [ s_k (Σ(q' - 128)k' + (m_q / s_q + 128) Σk') + m_k (Σq' + Π m_q / s_q) ]

        those of Σk', of m_k and, times `logit_scale`, of all.
    """
    count: tl.constexpr = COLUMNS // PADDED
    minimum, scale, query_sum = _query_ranges(
        unit_queries, GROUP, HEAD_DIM, PARTITION, COLUMNS, count
    )
    operands = [
        _query_operand(
            unit_queries,
            minimum,
            scale,
            index,
            GROUP,
            HEAD_DIM,
            PARTITION,
            WIDTH,
            BYTES,
            COLUMNS,
            count,
        )
        for index in (0, 1, 2, 3)[: 8 // BITS]
    ]
    ratio = tl.div_rn(minimum, scale)
    of_sum = tl.reshape(ratio + 128.0, (1, PADDED, count))
    of_minimum = tl.reshape(query_sum + PARTITION * ratio, (1, PADDED, count))
    return operands, of_sum, of_minimum, tl.reshape(scale * logit_scale, (1, PADDED, count))


@triton.jit
def _logits_on_codes(
    packed,
    minima,
    scales,
    sums,
    tile,
    operands,
    of_sum,
    of_minimum,
    of_all,
    PADDED: tl.constexpr,
    PARTITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Logits of a block of keys by products of codes with codes: (BLOCK, PADDED) float32."""
    product = tl.zeros((BLOCK, COLUMNS), tl.int32)
    for index in tl.static_range(8 // BITS):
        code = _codes(packed, index, BITS, INTERPRETED)
        product = tl.dot(code, operands[index], product, out_dtype=tl.int32)
    count: tl.constexpr = COLUMNS // PADDED
    product = tl.reshape(product.to(tl.float32), (BLOCK, PADDED, count))
    partition = tl.arange(0, count)[None, :]
    at = tile * PARTITIONS + (tl.arange(0, BLOCK)[:, None] * PARTITIONS + partition)
    there = partition < PARTITIONS
    key_minimum = tl.load(minima + at, mask=there, other=0.0).to(tl.float32)[:, None, :]
    key_scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)[:, None, :]
    key_sum = tl.load(sums + at, mask=there, other=0).to(tl.float32)[:, None, :]
    term = key_scale * (product + of_sum * key_sum) + key_minimum * of_minimum
    return tl.sum(term * of_all, axis=2)


@triton.jit
def _logits_of_decoded(
    packed,
    minima,
    scales,
    tile,
    unit_queries,
    logit_scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The same by decoded keys and queries as they are, in float32: slow, for measurements."""
    token = tile + tl.arange(0, BLOCK)
    byte, head = tl.arange(0, BYTES), tl.arange(0, COLUMNS)[None, :]
    used = (byte < WIDTH)[:, None] & (head < GROUP)
    product = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for index in tl.static_range(8 // BITS):
        key = _decode_channels(
            packed,
            minima,
            scales,
            token,
            (byte < WIDTH)[None, :],
            index,
            True,
            HEAD_DIM,
            BITS,
            PARTITION,
            WIDTH,
            BYTES,
        )
        at = head * HEAD_DIM + (index * WIDTH + byte)[:, None]
        query = tl.load(unit_queries + at, mask=used, other=0.0) * logit_scale
        product = tl.dot(key, query, product, input_precision="ieee")
    # Columns beyond the heads are 0.
    return tl.sum(tl.reshape(product, (BLOCK, COLUMNS // PADDED, PADDED)), axis=1)


@triton.jit(
    do_not_specialize=["first_layer", "page_stride", "capacity"],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _score(
    queries,
    codes,
    minima,
    scales,
    sums,
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
    LAYERS: tl.constexpr,
    POOL_LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_CHUNKS: tl.constexpr,
    FINISH_BLOCK: tl.constexpr,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DECODES: tl.constexpr,
    EXACT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    tokens = tl.load(positions + row) + 1
    start = chunk * CHUNK
    if tl.load(slots + row) >= 0 and start < tokens:
        layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
        unit_queries = queries + unit * GROUP * HEAD_DIM
        unit_logits = logits + unit * capacity * PADDED
        stop = tl.minimum(start + CHUNK, tokens)
        coded = coded_tokens(tokens, GROUP_TOKENS, RING)
        if not DECODES:
            operands, of_sum, of_minimum, of_all = _query_operands(
                unit_queries,
                scale,
                GROUP,
                PADDED,
                HEAD_DIM,
                BITS,
                PARTITION,
                WIDTH,
                BYTES,
                COLUMNS,
            )
        token, byte = tl.arange(0, BLOCK), tl.arange(0, BYTES)[None, :]
        for first in tl.range(start, tl.minimum(stop, coded), BLOCK, num_stages=STAGES):
            page = tl.load(page_table + row * page_stride + first // PAGE).to(tl.int64)
            tile = ((page * POOL_LAYERS + layer) * KV_HEADS + head) * PAGE + first % PAGE
            # What a page holds beyond the last token is read too, and not written.
            at = tile * WIDTH + (token[:, None] * WIDTH + byte)
            packed = tl.load(codes + at, mask=byte < WIDTH, other=0)
            if DECODES:
                logit = _logits_of_decoded(
                    packed,
                    minima,
                    scales,
                    tile,
                    unit_queries,
                    scale,
                    GROUP,
                    PADDED,
                    HEAD_DIM,
                    BLOCK,
                    BITS,
                    PARTITION,
                    WIDTH,
                    BYTES,
                    COLUMNS,
                )
            else:
                logit = _logits_on_codes(
                    packed,
                    minima,
                    scales,
                    sums,
                    tile,
                    operands,
                    of_sum,
                    of_minimum,
                    of_all,
                    PADDED,
                    HEAD_DIM // PARTITION,
                    BLOCK,
                    BITS,
                    COLUMNS,
                    INTERPRETED,
                )
            resident = first + token < tl.minimum(stop, coded)
            store_logits(logit, first + token, resident, unit_logits, PADDED)
        if coded < stop:
            score_full_precision(
                unit_queries,
                key_ring,
                slots + row,
                tl.maximum(start, coded),
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
                GROUP_TOKENS,
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
