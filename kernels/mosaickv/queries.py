"""Queries in the frames of packed keys, Triton: rotated once, and not the keys (section 5.3)."""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.mosaickv.layout import Layout
from cache_rank_kernels.mosaickv.store import PackedStore
from torch import Tensor


def rotate_queries(
    store: PackedStore, queries: Tensor, slots: Tensor, first_layer: int, rotated: Tensor
) -> None:
    """Rotate the queries of every row as the keys of each strategy of its sequence are. One launch.

    Args:
        store: that the keys are in.
        queries: (R, L, Hq, D) float32.
        slots: (R,) int32; a row of slot -1 is left alone.
        first_layer: of the L layers in the store.
        rotated: (>= R * L * Hkv, strategies, G, columns) float32, written in place.
    """
    layout = Layout.of(store)
    rows, layers, query_heads, _ = queries.shape
    strategies, group = rotated.shape[1:3]
    assert queries.is_contiguous()
    assert group == query_heads // layout.kv_heads
    _rotate[(strategies, rows * layers * layout.kv_heads)](
        queries,
        store.rotations,
        store.rows,
        slots,
        rotated,
        first_layer,
        strategies,
        store.rows.shape[1],
        LAYERS=layers,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),  # of a product
        LAYOUT=layout,
        num_warps=8,
    )


@triton.jit(
    do_not_specialize=["first_layer", "strategies", "in_table"],
    do_not_specialize_on_alignment=["slots"],
)
def _rotate(
    queries,
    rotations,
    rows,
    slots,
    rotated,
    first_layer,
    strategies,
    in_table,
    LAYERS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    strategy, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + unit // (LAYERS * LAYOUT.kv_heads)).to(tl.int64)
    is_strategy = (slot >= 0) & (strategy < in_table)
    table = tl.load(rows + slot * in_table + strategy, mask=is_strategy, other=-1)
    if table < 0:
        return
    layer = first_layer + (unit // LAYOUT.kv_heads) % LAYERS
    matrix = (table.to(tl.int64) * LAYOUT.layers + layer) * 2 * LAYOUT.kv_heads
    matrix += unit % LAYOUT.kv_heads
    head, channel = tl.arange(0, ROWS)[:, None], tl.arange(0, LAYOUT.columns)[None, :]
    dims = tl.arange(0, LAYOUT.head_dim)
    query_at = (unit * GROUP + head) * LAYOUT.head_dim + dims[None, :]
    query = tl.load(queries + query_at, mask=head < GROUP, other=0.0)
    at = (matrix * LAYOUT.head_dim + dims)[:, None] * LAYOUT.channels + channel
    rotation = tl.load(rotations + at, mask=channel < LAYOUT.channels, other=0.0)
    product = tl.dot(query, rotation.to(tl.float32), input_precision="ieee")
    target = rotated + (unit * strategies + strategy) * GROUP * LAYOUT.columns
    tl.store(target + head * LAYOUT.columns + channel, product, mask=head < GROUP)
