"""Queries of HACK as 8-bit codes in the columns of a matrix product, Triton.

A column holds one head's codes of one partition, and 0 in all other channels. So one product gives
Σ q'k' of every head and partition.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from cache_rank.kernels.coded.rounding import nearest_integers
from cache_rank.kernels.hack.reference import GROUP, HackCodec
from cache_rank.kernels.nibbles.triton import unpack_codes

_LEAST_COLUMNS = 8
"""Keys are multiplied with at least this many columns of queries."""


class Constants(NamedTuple):
    """What products with the codes of keys are compiled for.

    Attributes:
        bits, partition, width: those of keys, see `_Encoding` of triton.py.
        columns: the columns of queries in a product.
        bytes: how many bytes of a token are read: `width`, or more, which count for nothing.
        block: how many tokens are multiplied at once.
        sums_anew: see `HackCodec`.
    """

    bits: int
    partition: int
    width: int
    columns: int
    bytes: int
    block: int
    sums_anew: bool = False

    @classmethod
    def of(cls, codec: HackCodec, head_dim: int, padded: int, block: int = GROUP) -> Constants:
        """Those for so many queries of a KV head, padded to a power of two."""
        partition, width = min(codec.partition, head_dim), head_dim * codec.bits // 8
        columns = max(_LEAST_COLUMNS, padded * (head_dim // partition))
        least_bytes = max(32, width)  # the matrix unit takes no fewer
        return cls(codec.bits, partition, width, columns, least_bytes, block, codec.sums_anew)


@triton.jit
def _query_codes(query, minimum, scale):
    """Compute 8-bit codes of queries, float32 in [0, 255], by the formulas of the reference."""
    return tl.clamp(nearest_integers(tl.div_rn(query - minimum, scale)), 0.0, 255.0)


@triton.jit
def _query_ranges(
    queries,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COUNT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Find the minimum, scale and sum of codes of each column's partition: (columns,) float32.

    Column head · COUNT + z is that of partition z. A scale is 1 where all codes are 0, so that it
    can be divided by. Where there is no such head or partition, all else is 0.
    """
    column = tl.arange(0, CONSTANTS.columns)
    head, index = column // COUNT, column % COUNT
    used = (head < GROUP) & (index < HEAD_DIM // CONSTANTS.partition)
    at = (head * HEAD_DIM + index * CONSTANTS.partition)[:, None] + tl.arange(
        0, CONSTANTS.partition
    )[None, :]
    query = tl.load(queries + at, mask=used[:, None], other=0.0)
    minimum = tl.min(query, axis=1)
    scale = tl.div_rn(tl.max(query, axis=1) - minimum, 255.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return minimum, scale, tl.sum(_query_codes(query, minimum[:, None], scale[:, None]), axis=1)


@triton.jit
def _query_operand(
    queries,
    minimum,
    scale,
    INDEX: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COUNT: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """What the codes INDEX of the keys' bytes are multiplied with: (bytes, columns) int8.

    It is the queries' codes less 128, and 0 where a channel is not in the column's partition.
    """
    byte, column = tl.arange(0, CONSTANTS.bytes)[:, None], tl.arange(0, CONSTANTS.columns)[None, :]
    channel, head = INDEX * CONSTANTS.width + byte, column // COUNT
    used = (
        (byte < CONSTANTS.width)
        & (head < GROUP)
        & (channel // CONSTANTS.partition == column % COUNT)
    )
    query = tl.load(queries + head * HEAD_DIM + channel, mask=used, other=0.0)
    codes = _query_codes(query, minimum[None, :], scale[None, :])
    return tl.where(used, codes - 128.0, 0.0).to(tl.int32).to(tl.int8)


@triton.jit
def query_operands(
    queries,
    logit_scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """What a block of keys is multiplied with.

    Returns:
        The `_query_operand` of each code of a byte; and three factors, (1, PADDED, columns /
        PADDED) each, of Eq. 4 in the order of what a key brings:

            s_q [ s_k (Σ(q' - 128)k' + (m_q / s_q + 128) Σk') + m_k (Σq' + Π m_q / s_q) ]

        They are the factor of Σk', that of m_k, and s_q times `logit_scale`.
    """
    COUNT: tl.constexpr = CONSTANTS.columns // PADDED
    minimum, scale, query_sum = _query_ranges(queries, GROUP, HEAD_DIM, COUNT, CONSTANTS)
    operands = [
        _query_operand(queries, minimum, scale, index, GROUP, HEAD_DIM, COUNT, CONSTANTS)
        for index in (0, 1, 2, 3)[: 8 // CONSTANTS.bits]
    ]
    ratio = tl.div_rn(minimum, scale)
    of_sum = tl.reshape(ratio + 128.0, (1, PADDED, COUNT))
    of_minimum = tl.reshape(query_sum + CONSTANTS.partition * ratio, (1, PADDED, COUNT))
    return operands, of_sum, of_minimum, tl.reshape(scale * logit_scale, (1, PADDED, COUNT))


@triton.jit
def _sums_of_keys(packed, INTERPRETED: tl.constexpr, CONSTANTS: tl.constexpr, COUNT: tl.constexpr):
    """Sum up the codes of each column's partition by products with ones: (block, columns)."""
    byte, column = tl.arange(0, CONSTANTS.bytes)[:, None], tl.arange(0, CONSTANTS.columns)[None, :]
    BLOCK: tl.constexpr = CONSTANTS.block
    COLUMNS: tl.constexpr = CONSTANTS.columns
    sums = tl.zeros((BLOCK, COLUMNS), tl.int32)
    for index in tl.static_range(8 // CONSTANTS.bits):
        partition = (index * CONSTANTS.width + byte) // CONSTANTS.partition
        ones = (byte < CONSTANTS.width) & (partition == column % COUNT)
        code = unpack_codes(packed, index, CONSTANTS.bits, INTERPRETED)
        sums = tl.dot(code, ones.to(tl.int8), sums, out_dtype=tl.int32)
    return sums


@triton.jit
def logits_on_codes(
    packed,
    planes,
    tile,
    query,
    PADDED: tl.constexpr,
    PARTITIONS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CONSTANTS: tl.constexpr,
):
    """Logits of a block of keys by products of codes with codes: (block, PADDED) float32."""
    minima, scales, sums = planes[1], planes[2], planes[3]
    operands, of_sum, of_minimum, of_all = query
    BLOCK: tl.constexpr = CONSTANTS.block
    COLUMNS: tl.constexpr = CONSTANTS.columns
    # Products of the codes: [block, columns]
    product = tl.zeros((BLOCK, COLUMNS), tl.int32)
    for index in tl.static_range(8 // CONSTANTS.bits):
        code = unpack_codes(packed, index, CONSTANTS.bits, INTERPRETED)
        product = tl.dot(code, operands[index], product, out_dtype=tl.int32)
    COUNT: tl.constexpr = COLUMNS // PADDED
    product = tl.reshape(product.to(tl.float32), (BLOCK, PADDED, COUNT))
    # What codes of keys are relative to, [block, 1, columns / PADDED] each, and Eq. 4.
    partition = tl.arange(0, COUNT)[None, :]
    at = tile * PARTITIONS + (tl.arange(0, BLOCK)[:, None] * PARTITIONS + partition)
    there = partition < PARTITIONS
    key_minimum = tl.load(minima + at, mask=there, other=0.0).to(tl.float32)[:, None, :]
    key_scale = tl.load(scales + at, mask=there, other=0.0).to(tl.float32)[:, None, :]
    if CONSTANTS.sums_anew:
        key_sum = _sums_of_keys(packed, INTERPRETED, CONSTANTS, COUNT).to(tl.float32)
        key_sum = tl.reshape(key_sum, (BLOCK, PADDED, COUNT))
    else:
        key_sum = tl.load(sums + at, mask=there, other=0).to(tl.float32)[:, None, :]
    term = key_scale * (product + of_sum * key_sum) + key_minimum * of_minimum
    return tl.sum(term * of_all, axis=2)
