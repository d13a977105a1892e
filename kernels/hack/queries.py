"""Queries of HACK as 8-bit codes in the columns of a matrix product, Triton.

A column is of one head and one partition, and 0 outside of it, so that one product gives Σ a'b' of
every head and partition.
"""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.coded.parts import nearest_integers


@triton.jit
def _query_codes(query, minimum, scale):
    """8-bit codes of queries, float32 in [0, 255], by the formulas of the reference."""
    return tl.clamp(nearest_integers(tl.div_rn(query - minimum, scale)), 0.0, 255.0)


@triton.jit
def _query_ranges(
    queries,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COUNT: tl.constexpr,
    OWN: tl.constexpr,
):
    """Minimum, scale and sum of the codes of each column's partition: (columns,) float32.

    Column head · COUNT + z is of partition z; of heads and partitions that there are not, all is 0
    but the scale. A scale is 1 where all codes are 0, so that it can be divided by.
    """
    column = tl.arange(0, OWN.columns)
    head, index = column // COUNT, column % COUNT
    used = (head < GROUP) & (index < HEAD_DIM // OWN.partition)
    at = (head * HEAD_DIM + index * OWN.partition)[:, None] + tl.arange(0, OWN.partition)[None, :]
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
    OWN: tl.constexpr,
):
    """What the codes INDEX of bytes of keys are multiplied with: (bytes, columns) int8.

    The queries' codes less 128, and 0 where a channel is not of the column's partition.
    """
    byte, column = tl.arange(0, OWN.bytes)[:, None], tl.arange(0, OWN.columns)[None, :]
    channel, head = INDEX * OWN.width + byte, column // COUNT
    used = (byte < OWN.width) & (head < GROUP) & (channel // OWN.partition == column % COUNT)
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
    OWN: tl.constexpr,
):
    """What a block of keys is multiplied with.

    Returns:
        `_query_operand` of each code of a byte; and factors, (1, PADDED, columns / PADDED) each,
        of Eq. 4 divided by s_q, gathered by what a key brings:

            s_q [ s_k (Σ(q' - 128)k' + (m_q / s_q + 128) Σk') + m_k (Σq' + Π m_q / s_q) ]

        those of Σk', of m_k and, times `logit_scale`, of all.
    """
    count: tl.constexpr = OWN.columns // PADDED
    minimum, scale, query_sum = _query_ranges(queries, GROUP, HEAD_DIM, count, OWN)
    operands = [
        _query_operand(queries, minimum, scale, index, GROUP, HEAD_DIM, count, OWN)
        for index in (0, 1, 2, 3)[: 8 // OWN.bits]
    ]
    ratio = tl.div_rn(minimum, scale)
    of_sum = tl.reshape(ratio + 128.0, (1, PADDED, count))
    of_minimum = tl.reshape(query_sum + OWN.partition * ratio, (1, PADDED, count))
    return operands, of_sum, of_minimum, tl.reshape(scale * logit_scale, (1, PADDED, count))
