"""Queries weigh the int2 elements of sketches, and logits are sums of the products, Triton.

Elements are multiplied as integers of 8 bits: a byte of four is masked four times, four bytes in an
instruction, and each of the four is one product on the matrix unit. Weights, which are computed
once a step, are rounded to int8. So what a token costs is its bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.nibbles.triton import shift_and_mask
from cache_rank.kernels.sketch.reference import WEIGHT_RANGE, Sketch

_BLOCK_ELEMENTS = 32
"""A program computes so many of the weights of its query heads."""

_LEAST_COLUMNS = 8
"""A product on a matrix unit has at least this many columns."""

_WEIGHT_RANGE = tl.constexpr(float(WEIGHT_RANGE))
_TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 · 2^23: the bits of it and a number end in those of the nearest integer."""


def weigh_elements(
    queries: Tensor, sketch: Sketch, first_layer: int, scale: float, weights: Tensor
) -> None:
    """Compute what queries give the elements. One launch; D is a power of two.

    Args:
        queries: (R, L, Hq, D), any float dtype; only the stride of R may be any.
        sketch: of all layers.
        first_layer: of the L layers.
        scale: factor on the logits.
        weights: (R, L, Hq, 4 · bytes) float32, or as many numbers and more, written in place.
    """
    rows, layers, query_heads, head_dim = queries.shape
    kv_heads, elements = sketch.queries.shape[1:3]
    group = query_heads // kv_heads
    assert queries[0].is_contiguous()
    assert sketch.queries.is_contiguous()
    assert sketch.queries.shape[3] == head_dim
    assert weights.numel() >= rows * layers * query_heads * elements
    parts = triton.cdiv(elements, _BLOCK_ELEMENTS)
    block_queries = 64 if head_dim <= 128 else 16  # more of 256 do not fit into registers
    _weigh_elements[(layers * kv_heads, triton.cdiv(rows * group, block_queries), parts)](
        queries,
        sketch.queries,
        weights,
        rows,
        first_layer,
        scale,
        queries.stride(0),
        LAYERS=layers,
        KV_HEADS=kv_heads,
        GROUP=group,
        ELEMENTS=elements,
        HEAD_DIM=head_dim,
        BLOCK_ELEMENTS=_BLOCK_ELEMENTS,
        BLOCK_QUERIES=block_queries,
    )


@triton.jit(do_not_specialize=["rows", "first_layer", "scale"])
def _weigh_elements(
    queries,
    maps,
    weights,
    rows,
    first_layer,
    scale,
    row_stride,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ELEMENTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
):
    """One program computes BLOCK_ELEMENTS weights of BLOCK_QUERIES heads of a layer and KV head."""
    layer, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    query = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    row, in_group = query // GROUP, query % GROUP
    is_query = (row < rows)[:, None]
    dims = tl.arange(0, HEAD_DIM)
    element = tl.program_id(2) * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
    index = (row * LAYERS + layer) * KV_HEADS * GROUP + head * GROUP + in_group
    index = index.to(tl.int64)[:, None]
    source = row.to(tl.int64) * row_stride
    source += (layer * KV_HEADS * GROUP + head * GROUP + in_group) * HEAD_DIM
    content = tl.load(queries + source[:, None] + dims[None, :], mask=is_query, other=0.0)
    content = content.to(tl.float32)
    own = ((first_layer + layer) * KV_HEADS + head).to(tl.int64) * ELEMENTS * HEAD_DIM
    is_element = element < ELEMENTS
    map_of = tl.load(
        maps + own + element[:, None] * HEAD_DIM + dims[None, :],
        mask=is_element[:, None],
        other=0.0,
    )  # [BLOCK_ELEMENTS, D]
    # In three products of TensorFloat-32, which is nearly as exact as float32.
    product = tl.dot(content * scale, tl.trans(map_of), input_precision="tf32x3")
    tl.store(
        weights + index * ELEMENTS + element[None, :], product, mask=is_query & is_element[None, :]
    )


def columns_of_head(heads: int) -> int:
    """How many columns each of so many heads has: one, and zeros for the matrix unit."""
    return max(1, _LEAST_COLUMNS // heads)


@triton.jit
def load_weights(
    unit_weights,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNITS: tl.constexpr = 1,
):
    """Load the weights of the elements of some units, as int8.

    Of several units the sketches of a token lie one behind the other, and the weights of each are
    zero in the bytes of the others.

    Returns:
        weights: for each of the four elements of a byte, (WIDTH, UNITS * PADDED * COLUMNS) int8.
        scale: (UNITS * PADDED,) float32, what 1 stands for in the products of `logits_of`.
    """
    column = tl.arange(0, UNITS * PADDED * COLUMNS)
    unit, of_unit = column // (PADDED * COLUMNS), column % (PADDED * COLUMNS)
    byte = tl.arange(0, WIDTH)[None, :] - unit[:, None] * SIZE
    query = of_unit // COLUMNS
    at = unit_weights + (unit * GROUP + query)[:, None] * (4 * SIZE) + byte
    is_weight = (query < GROUP)[:, None] & (of_unit % COLUMNS == 0)[:, None]
    is_weight &= (byte >= 0) & (byte < SIZE)
    # [UNITS * PADDED * COLUMNS, WIDTH] each
    w0 = tl.load(at, mask=is_weight, other=0.0)
    w1 = tl.load(at + SIZE, mask=is_weight, other=0.0)
    w2 = tl.load(at + 2 * SIZE, mask=is_weight, other=0.0)
    w3 = tl.load(at + 3 * SIZE, mask=is_weight, other=0.0)
    largest = tl.maximum(tl.maximum(tl.abs(w0), tl.abs(w1)), tl.maximum(tl.abs(w2), tl.abs(w3)))
    scale = tl.maximum(tl.max(largest, axis=1), 1e-30) / _WEIGHT_RANGE
    weights = (
        tl.trans(_to_int8(w0, scale)),
        tl.trans(_to_int8(w1, scale)),
        tl.trans(_to_int8(w2, scale)),
        tl.trans(_to_int8(w3, scale)),
    )
    scale = tl.max(tl.reshape(scale, (UNITS * PADDED, COLUMNS)), axis=1)
    return weights, scale * 0.25


@triton.jit
def _to_int8(weights, scale):
    return (weights / scale[:, None] + _TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def logits_of(
    packed,
    weights,
    scale,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The logits of sketches, (BLOCK, WIDTH) uint8: (BLOCK, PADDED) float32.

    For `weights` and `scale` see `load_weights`.
    """
    products = tl.zeros((BLOCK, PADDED * COLUMNS), tl.int32)
    fourfold = tl.zeros((BLOCK, PADDED * COLUMNS), tl.int32)
    for index in tl.static_range(0, 4, 2):
        elements = _elements(packed, index, INTERPRETED)  # [BLOCK, WIDTH]
        products = tl.dot(elements, weights[index], products, out_dtype=tl.int32)
        elements = _elements(packed, index + 1, INTERPRETED)
        fourfold = tl.dot(elements, weights[index + 1], fourfold, out_dtype=tl.int32)
    products = products * 4 + fourfold
    if COLUMNS > 1:
        products = tl.sum(tl.reshape(products, (BLOCK, PADDED, COLUMNS)), axis=2)
    return products.to(tl.float32) * scale[None, :]


@triton.jit
def _elements(packed, INDEX: tl.constexpr, INTERPRETED: tl.constexpr):
    """The elements of one place in bytes of four, int8; the second and the last one fourfold."""
    # Places that are shifted alike share the shift.
    return shift_and_mask(packed, INDEX // 2 * 4, 3 << INDEX % 2 * 2, INTERPRETED)
