"""QuantSpec codes, Triton: the functions of the format; `Format` says what each of them does.

The scale of a channel is the same for a whole group of keys. So the query is multiplied with it,
once a group, and then with the codes themselves, as integers of 8 bits:

    q·k = Σ (q S) code + Σ q Z

Where the upper nibble alone is read, a code is that nibble. Where both are, a code is 16 upper +
lower - 120 in one byte, which is 16 / S times what the decoded key has above Z, less 120.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.coded.format import Format, Launch, Parameters
from cache_rank.kernels.coded.int8_split import (
    int8_columns,
    load_query_half,
    split_int8,
    sum_int8_products,
    unit_of_heads,
    unit_of_rows,
)
from cache_rank.kernels.coded.reference import CodedTokens
from cache_rank.kernels.coded.rounding import is_finite, nearest_integers, power_below, quotient
from cache_rank.kernels.coded.tokens import load_group, place_in_pages, store_gathered
from cache_rank.kernels.nibbles.triton import pack_nibbles, signed, unpack_codes
from cache_rank.kernels.quantspec.attending import attend, attend_many, attending
from cache_rank.kernels.quantspec.reference import QuantSpecCodec
from cache_rank.kernels.score.triton import store_logits

_MOST_OF_A_WARP = 512
"""One warp multiplies keys with queries of so many elements, of all heads of a KV head.

What larger groups of query heads, or larger heads, need does not fit its registers.
"""

_ONE_WARP = Launch(chunks=1, warps=1, stages=5, ring_block=16)
"""Programs of one warp wait for no other: queries change with every group."""


class _Scoring(NamedTuple):
    """What `_logits` is compiled for.

    Attributes:
        bits: how many bits of a key are read, 4 or 8.
        columns: how many columns of the product a query head has.
    """

    bits: int
    columns: int


def _encoding(tokens: CodedTokens) -> Parameters:
    return Parameters()


def _scoring(tokens: CodedTokens, queries: Tensor, out: Tensor) -> Parameters:
    codec = tokens.codecs[0]
    assert isinstance(codec, QuantSpecCodec)
    of_one_head = queries.shape[2] * queries.shape[3] // out.shape[2]
    launch = _ONE_WARP if of_one_head <= _MOST_OF_A_WARP else Launch()
    return Parameters((), _Scoring(codec.read_bits, int8_columns(queries, out)), launch)


@triton.jit
def _nibbles(exact, scale, zero):
    """Compute upper and lower codes, float32 like `exact`, by the formulas of the reference."""
    offset = exact - zero
    upper = tl.clamp(nearest_integers(quotient(offset, scale)), 0.0, 15.0)
    lower = quotient(offset - scale * upper, scale * 0.0625)
    return upper, tl.clamp(nearest_integers(lower), -8.0, 7.0)


@triton.jit
def _stored_scale(largest, zero, DTYPE: tl.constexpr):
    """The scale as it is stored."""
    return tl.div_rn(largest - zero, 15.0).to(DTYPE)


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
    """Encode one group; see `Format`. Keys have a scale a channel, and values one a token."""
    upper, lower, scales, zeros = planes
    HALF: tl.constexpr = LAYOUT.head_dim // 2
    DTYPE: tl.constexpr = scales.dtype.element_ty
    dims = tl.arange(0, HALF)
    # [group tokens, D / 2] each
    low, high = load_group(source, dims, LAYOUT), load_group(source, dims + HALF, LAYOUT)
    token = group * LAYOUT.group_tokens + tl.arange(0, LAYOUT.group_tokens)
    if OF_KEYS:
        # [D / 2] each
        low_zero, high_zero = tl.min(low, axis=0), tl.min(high, axis=0)
        low_stored = _stored_scale(tl.max(low, axis=0), low_zero, DTYPE)
        high_stored = _stored_scale(tl.max(high, axis=0), high_zero, DTYPE)
        low_at = group * LAYOUT.head_dim + dims
        tl.store(scales + low_at, low_stored)
        tl.store(zeros + low_at, low_zero.to(DTYPE))
        tl.store(scales + low_at + HALF, high_stored)
        tl.store(zeros + low_at + HALF, high_zero.to(DTYPE))
        low_scale, high_scale = low_stored.to(tl.float32), high_stored.to(tl.float32)
        finite = is_finite(low_scale) & is_finite(high_scale)
        low_upper, low_lower = _nibbles(low, low_scale[None, :], low_zero[None, :])
        high_upper, high_lower = _nibbles(high, high_scale[None, :], high_zero[None, :])
    else:
        # [group tokens] each
        zero = tl.minimum(tl.min(low, axis=1), tl.min(high, axis=1))
        largest = tl.maximum(tl.max(low, axis=1), tl.max(high, axis=1))
        stored = _stored_scale(largest, zero, DTYPE)
        tl.store(scales + token, stored)
        tl.store(zeros + token, zero.to(DTYPE))
        scale = stored.to(tl.float32)
        finite = is_finite(scale)
        low_upper, low_lower = _nibbles(low, scale[:, None], zero[:, None])
        high_upper, high_lower = _nibbles(high, scale[:, None], zero[:, None])
    # Nibbles, and whether all that went into them is finite.
    at = token[:, None] * HALF + dims[None, :]
    tl.store(upper + at, pack_nibbles(low_upper.to(tl.int32), high_upper.to(tl.int32)))
    tl.store(lower + at, pack_nibbles(low_lower.to(tl.int32), high_lower.to(tl.int32)))
    of_tokens = tl.min((is_finite(low) & is_finite(high)).to(tl.int32))
    return tl.minimum(of_tokens, tl.min(finite.to(tl.int32)))


@triton.jit
def _decode_half(upper, lower, scale, zero, IS_HIGH: tl.constexpr):
    """Decode half of the channels of tokens from bytes of nibbles: (n, D / 2) float32."""
    if IS_HIGH:
        upper, lower = upper >> 4, lower >> 4
    else:
        upper, lower = upper & 15, lower & 15
    offset = scale * upper.to(tl.float32) + scale * 0.0625 * signed(lower.to(tl.int32))
    return offset + zero


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
    upper, lower, scales, zeros = planes
    HALF: tl.constexpr = LAYOUT.head_dim // 2
    dims = tl.arange(0, HALF)
    mask = target.is_coded[:, None]
    at = token[:, None] * HALF + dims[None, :]
    uppers = tl.load(upper + at, mask=mask, other=0)
    lowers = tl.load(lower + at, mask=mask, other=0)
    for is_high in tl.static_range(2):
        if OF_KEYS:
            group = (token // LAYOUT.group_tokens)[:, None]
            channel = group * LAYOUT.head_dim + is_high * HALF + dims[None, :]
            scale = tl.load(scales + channel, mask=mask, other=0.0).to(tl.float32)
            zero = tl.load(zeros + channel, mask=mask, other=0.0).to(tl.float32)
        else:
            scale = tl.load(scales + token, mask=target.is_coded, other=0.0).to(tl.float32)[:, None]
            zero = tl.load(zeros + token, mask=target.is_coded, other=0.0).to(tl.float32)[:, None]
        decoded = _decode_half(uppers, lowers, scale, zero, is_high)
        store_gathered(target, decoded, is_high * HALF, LAYOUT)


@triton.jit
def _both_nibbles(upper, lower, IS_HIGH: tl.constexpr, INTERPRETED: tl.constexpr):
    """Compute 16 upper + lower - 120 of the low or high nibbles of bytes: int8 of the same shape.

    That is the byte of both nibbles, with the top bit of each flipped. Four bytes take three
    instructions; 0xE4 takes bits of the first operand where the third has ones, else of the second.
    """
    if INTERPRETED:
        in_place = (upper & 0xF0) | (lower >> 4) if IS_HIGH else ((upper & 15) << 4) | (lower & 15)
        return (in_place ^ 0x88).to(tl.int8, bitcast=True)
    else:
        IN_PLACE: tl.constexpr = (
            "shr.b32 t, $2, 4; lop3.b32 t, $1, t,"
            if IS_HIGH
            else "shl.b32 t, $1, 4; lop3.b32 t, t, $2,"
        )
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; " + IN_PLACE + " 0xF0F0F0F0, 0xE4; xor.b32 $0, t, 0x88888888; }",
            "=r,r,r",
            [upper, lower],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )


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
    upper, lower, scales, zeros = planes
    HALF: tl.constexpr = LAYOUT.head_dim // 2
    SIZE: tl.constexpr = LAYOUT.group_tokens
    # [PADDED, D / 2] each
    low_query = load_query_half(queries, 0, scale, GROUP, PADDED, LAYOUT.head_dim)
    high_query = load_query_half(queries, 1, scale, GROUP, PADDED, LAYOUT.head_dim)
    # The same in units in which they fit two int8: [PADDED * columns, D / 2] each
    COLUMNS: tl.constexpr = CONSTANTS.columns
    low_numbers = load_query_half(queries, 0, scale, GROUP, PADDED, LAYOUT.head_dim, COLUMNS)
    high_numbers = load_query_half(queries, 1, scale, GROUP, PADDED, LAYOUT.head_dim, COLUMNS)
    unit = unit_of_rows(tl.max(tl.maximum(tl.abs(low_numbers), tl.abs(high_numbers)), axis=1))
    low_numbers, high_numbers = low_numbers / unit[:, None], high_numbers / unit[:, None]
    query_unit = unit_of_heads(unit, COLUMNS, PADDED)
    dims, token = tl.arange(0, HALF), tl.arange(0, SIZE)
    # Group after group. Stages of the loop, unlike those of a launch, bring the zeros ahead too.
    for first in tl.range(start, coded_stop, SIZE, num_stages=STAGES):
        group = place_in_pages(pages, first, layer, head, LAYOUT) // SIZE
        # Queries times scales, as int8, and what the zeros add. A unit of scales is a power of
        # two for the whole group: one for each head would take as long as the products.
        channel = group * LAYOUT.head_dim + dims
        low_scale = tl.load(scales + channel).to(tl.float32)
        high_scale = tl.load(scales + channel + HALF).to(tl.float32)
        low_rest = low_query * tl.load(zeros + channel).to(tl.float32)[None, :]
        high_rest = high_query * tl.load(zeros + channel + HALF).to(tl.float32)[None, :]
        scale_unit = power_below(tl.max(tl.maximum(low_scale, high_scale), axis=0))
        low_int8 = split_int8(low_numbers * (low_scale / scale_unit)[None, :], COLUMNS)
        high_int8 = split_int8(high_numbers * (high_scale / scale_unit)[None, :], COLUMNS)
        # Codes as integers: [group tokens, D / 2] each
        at = group * SIZE * HALF + token[:, None] * HALF + dims[None, :]
        uppers = tl.load(upper + at)
        if CONSTANTS.bits == 8:
            lowers = tl.load(lower + at)
            low_codes = _both_nibbles(uppers, lowers, False, INTERPRETED)
            high_codes = _both_nibbles(uppers, lowers, True, INTERPRETED)
            low_rest += 7.5 * (low_query * low_scale[None, :])
            high_rest += 7.5 * (high_query * high_scale[None, :])
        else:
            low_codes = unpack_codes(uppers, 0, 4, INTERPRETED)
            high_codes = unpack_codes(uppers, 1, 4, INTERPRETED)
        # Exact products with the int8: [group tokens, PADDED * columns]
        products = tl.dot(low_codes, tl.trans(low_int8), out_dtype=tl.int32)
        products = tl.dot(high_codes, tl.trans(high_int8), products, out_dtype=tl.int32)
        of_codes = sum_int8_products(products, COLUMNS, PADDED, SIZE)
        code_unit = query_unit * (scale_unit * (0.0625 if CONSTANTS.bits == 8 else 1.0))
        rest = tl.sum(low_rest + high_rest, axis=1)
        logit = of_codes * code_unit[None, :] + rest[None, :]
        # Groups are held as codes when they are complete, so that no token is beyond the last.
        store_logits(logit, first + token, tl.full((SIZE,), 1, tl.int1), logits, PADDED)


FORMAT = Format(
    _encode,
    _gather,
    _logits,
    _encoding,
    _scoring,
    attend=attend,
    attend_many=attend_many,
    attending=attending,
)
