"""Packed keys are scored, Triton (MosaicKV section 5.3).

A step takes three launches:

    _rotate         rotates queries by each strategy of their sequence
    _score          computes the logits of all tokens
    finish_scores   turns logits into scores
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.coded.tokens import place_in_pages
from cache_rank.kernels.mosaickv.packed import (
    Layout,
    in_words,
    run_at,
    tokens_in_pages,
    unpack_part,
)
from cache_rank.kernels.mosaickv.reference import PackedStore, PackedWorkspace
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score.triton import (
    CHUNK_TOKENS,
    finish_scores,
    load_query_parts,
    multiplies_float32,
    score_constants,
    score_full_precision,
    score_grid,
    scratch,
    store_logits,
    sum_up_chunk,
)

_VECTORS = 64
"""A program of four warps multiplies this many vectors at once."""

_REGISTERS = 168
"""A thread has this many, so that three programs, which wait for memory, share a multiprocessor."""


def score_packed_step(
    store: PackedStore,
    queries: Tensor,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: PackedWorkspace,
    out: Tensor,
) -> None:
    """See the reference. Each sequence has at most the workspace's number of strategies."""
    chunk = 2 * CHUNK_TOKENS
    layout, constants = Layout.of(store), score_constants(queries, workspace.of_tokens, out, chunk)
    key_ring, (chunks, units) = store.rings[0], score_grid(out, chunk)
    logits, partial = scratch(workspace.of_tokens, rounded=False)
    strategies, group = workspace.parts.shape[1], constants["GROUP"]
    assert workspace.parts.shape[0] >= units
    assert workspace.parts.shape[2] == constants["PARTS"] * constants["PADDED"]
    _rotate[(strategies, units)](
        queries,
        store.rotations,
        store.rows,
        rows.slots,
        workspace.exact,
        workspace.parts,
        workspace.weights,
        first_layer,
        strategies,
        store.rows.shape[1],
        LAYERS=constants["LAYERS"],
        GROUP=group,
        PADDED=constants["PADDED"],
        PARTS=constants["PARTS"],
        ROWS=max(16, triton.next_power_of_2(group)),  # a product has at least 16
        LAYOUT=layout,
        num_warps=8,
    )
    _score[(chunks, units)](
        queries,
        workspace.parts,
        workspace.weights,
        in_words(store.keys),
        key_ring,
        (store.strategy_of, store.rows, store.numbers),
        *rows,
        logits,
        partial,
        first_layer=first_layer,
        scale=scale,
        page_stride=rows.page_table.stride(0),
        capacity=out.shape[-1],
        strategies=strategies,
        buffers=store.strategy_of.shape[1],
        in_table=store.rows.shape[1],
        **constants,
        VECTORS=_VECTORS,
        LAYOUT=layout,
        EXACT=multiplies_float32(key_ring),
        maxnreg=_REGISTERS,
    )
    finish_scores(logits, partial, rows, constants, out)


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
    # In three products of TensorFloat-32: of float32, registers hold few.
    product = tl.dot(query, rotation.to(tl.float32), input_precision="tf32x3")
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


@triton.jit
def _load_queries(parts, weights, COUNT: tl.constexpr, LAYOUT: tl.constexpr):
    """Load COUNT rows of queries: (part, COUNT) of each part, and (COUNT,) weights."""
    row = tl.arange(0, COUNT)
    at = row[None, :] * LAYOUT.columns + tl.arange(0, LAYOUT.part)[:, None]
    CHANNEL_PARTS: tl.constexpr = LAYOUT.parts
    found = (tl.load(parts + at),)
    for part in tl.static_range(1, CHANNEL_PARTS):
        more = tl.load(parts + at + part * LAYOUT.part)
        # Triton unpacks no tuples.
        found = found + (more,)  # type: ignore[assignment]  # noqa: RUF005
    return found, tl.load(weights + row)


@triton.jit(
    do_not_specialize=[
        *("first_layer", "page_stride", "capacity"),
        *("strategies", "buffers", "in_table"),
    ],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _score(
    queries,
    query_parts,
    query_weights,
    keys,
    key_ring,
    tables,
    page_table,
    slots,
    positions,
    logits,
    partial,
    first_layer,
    scale,
    page_stride,
    capacity,
    strategies,
    buffers,
    in_table,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    VECTORS: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program scores CHUNK tokens of a unit, a row, layer and kv head."""
    # The chunk, how many of its tokens are packed, and whether there is anything to do.
    strategy_of, rows, numbers = tables
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    slot = tl.load(slots + row).to(tl.int64)
    tokens = tl.load(positions + row) + 1
    start = chunk * CHUNK
    if (slot < 0) | (start >= tokens):
        return
    unit_strategies = strategy_of + slot * buffers
    packed = tokens_in_pages(unit_strategies, tokens, LAYOUT)
    # Where the unit's tensors are.
    layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
    unit_logits = logits + unit * capacity * PADDED
    pages = page_table + row * page_stride
    stop = tl.minimum(start + CHUNK, tokens)
    # Packed tokens, a run of one strategy after the other, and some vectors of it at a time.
    DTYPE: tl.constexpr = tl.float32 if EXACT else key_ring.dtype.element_ty
    CHANNEL_PARTS: tl.constexpr = LAYOUT.parts
    COUNT: tl.constexpr = PARTS * PADDED
    first, last_packed = start, tl.minimum(stop, packed)
    while first < last_packed:
        BUFFERS: tl.constexpr = CHUNK // LAYOUT.buffer
        strategy, last = run_at(unit_strategies, first, last_packed, BUFFERS, LAYOUT)
        table = tl.load(rows + slot * in_table + strategy).to(tl.int64) * LAYOUT.layers + layer
        group = tl.load(numbers + table * 2 + 1)
        own = (unit * strategies + strategy) * COUNT
        own_parts, weight = _load_queries(
            query_parts + own * LAYOUT.columns, query_weights + own, COUNT, LAYOUT
        )
        weight *= scale
        for begin in range(first, last, VECTORS):
            token = begin + tl.arange(0, VECTORS)
            used = token < last
            entry = place_in_pages(pages, token, layer, head, LAYOUT, used)
            # Products, some channels after the other: [VECTORS, COUNT]
            product = tl.zeros((VECTORS, COUNT), tl.float32)
            none = tl.zeros(entry.shape, tl.uint32)
            word, before = none, none
            for part in tl.static_range(CHANNEL_PARTS):
                key, word, before = unpack_part(
                    keys, entry, used, word, before, part, group, LAYOUT
                )
                product = tl.dot(key.to(DTYPE), own_parts[part], product, input_precision="ieee")
            weighted = tl.reshape(product * weight[None, :], (VECTORS, PARTS, PADDED))
            store_logits(tl.sum(weighted, axis=1), token, used, unit_logits, PADDED)
        first = last
    # Tokens that are still in the ring, and then the scores of the unit.
    if packed < stop:
        score_full_precision(
            queries + unit * GROUP * HEAD_DIM,
            key_ring,
            slots + row,
            first=tl.maximum(packed, start),
            last=stop,
            layer=layer,
            head=head,
            scale=scale,
            pool_layers=LAYOUT.layers,
            unit_logits=unit_logits,
            KV_HEADS=KV_HEADS,
            GROUP=GROUP,
            PADDED=PADDED,
            PARTS=PARTS,
            HEAD_DIM=HEAD_DIM,
            PAGE=LAYOUT.ring,
            BLOCK=LAYOUT.buffer,
            IS_RING=True,
            STAGES=1,
            EXACT=EXACT,
        )
    share = partial + (unit * tl.cdiv(capacity, CHUNK) + chunk) * 2 * PADDED
    sum_up_chunk(start, stop, unit_logits, share, PADDED, CHUNK)
