"""Queries are rotated into the frames of packed keys, Triton (MosaicKV section 5.3)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.mosaickv.layout import Layout
from cache_rank.kernels.mosaickv.store import PackedStore
from cache_rank.kernels.score.triton import load_query_parts


def rotate_queries(
    store: PackedStore,
    queries: Tensor,
    slots: Tensor,
    first_layer: int,
    padded: int,
    rotated: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Rotate the queries of every row as each strategy of its sequence rotates keys. One launch.

    Queries are (R, L, Hq, D) float32; a row of slot -1 is left alone. Written are `exact`, `parts`
    and `weights` of a `PackedWorkspace` for at least R * L * Hkv units, whose heads are `padded`.
    """
    layout = Layout.of(store)
    rows, layers, query_heads, _ = queries.shape
    strategies, group = rotated[0].shape[1:3]
    assert queries.is_contiguous()
    assert group == query_heads // layout.kv_heads
    _rotate[(strategies, rows * layers * layout.kv_heads)](
        queries,
        store.rotations,
        store.rows,
        slots,
        *rotated,
        first_layer,
        strategies,
        store.rows.shape[1],
        LAYERS=layers,
        GROUP=group,
        PADDED=padded,
        PARTS=rotated[1].shape[2] // padded,
        ROWS=max(16, triton.next_power_of_2(group)),  # a product has at least 16
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
    exact,
    parts,
    weights,
    first_layer,
    strategies,
    in_table,
    LAYERS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program rotates the queries of one unit by the rotation of one strategy."""
    # Whether the sequence has the strategy, and where its rotation is.
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
    query = tl.load(queries + query_at, mask=head < GROUP, other=0.0)  # [ROWS, D]
    at = (matrix * LAYOUT.head_dim + dims)[:, None] * LAYOUT.channels + channel
    rotation = tl.load(rotations + at, mask=channel < LAYOUT.channels, other=0.0)  # [D, columns]
    product = tl.dot(query, rotation.to(tl.float32), input_precision="ieee")
    target = unit * strategies + strategy
    own = exact + target * GROUP * LAYOUT.columns
    tl.store(own + head * LAYOUT.columns + channel, product, mask=head < GROUP)
    # Their parts, which are taken from memory.
    tl.debug_barrier()
    DTYPE: tl.constexpr = parts.dtype.element_ty
    found, weight = load_query_parts(own, GROUP, PADDED, PARTS, LAYOUT.columns, DTYPE)
    row = target * PARTS * PADDED + tl.arange(0, PARTS * PADDED)
    tl.store(parts + row[:, None] * LAYOUT.columns + channel, found)
    tl.store(weights + row, weight)
