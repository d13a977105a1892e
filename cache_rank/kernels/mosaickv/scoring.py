"""Packed keys are scored, Triton.

A step takes three launches:

    rotate_queries  rotates queries by each strategy of their sequence
    _score          computes the logits of all tokens
    finish_scores   turns logits into scores
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.mosaickv.layout import Layout
from cache_rank.kernels.mosaickv.logits import load_queries, run_at, score_vectors
from cache_rank.kernels.mosaickv.packing import tokens_in_pages
from cache_rank.kernels.mosaickv.queries import rotate_queries
from cache_rank.kernels.mosaickv.store import PackedStore
from cache_rank.kernels.mosaickv.unpacking import in_words
from cache_rank.kernels.rows import PagedRows
from cache_rank.kernels.score.reference import ScoreWorkspace
from cache_rank.kernels.score.triton import (
    CHUNK_TOKENS,
    finish_scores,
    multiplies_float32,
    score_constants,
    score_full_precision,
    score_grid,
    score_workspace,
    scratch,
    sum_up_chunk,
)

_VECTORS = 64
"""A program of four warps multiplies this many vectors at once."""

_REGISTERS = 168
"""A thread has this many, so that three programs, which wait for memory, share a multiprocessor."""


class PackedWorkspace(NamedTuple):
    """Scratch of `score_packed_step`.

    Attributes:
        of_tokens: the scratch that all formats need.
        exact: (units, strategies, G, columns) float32, the queries of each unit, which is a row,
            layer and kv head, in the frame of each strategy.
        parts: (units, strategies, PARTS * PADDED, columns) in the dtype that keys are multiplied
            in, see `load_query_parts`.
        weights: (units, strategies, PARTS * PADDED) float32, the weights of the parts.
    """

    of_tokens: ScoreWorkspace
    exact: Tensor
    parts: Tensor
    weights: Tensor


def score_packed_workspace(
    store: PackedStore,
    rows: int,
    layers: int,
    group: int,
    capacity: int,
    strategies: int,
    device: torch.device,
) -> Any:
    """See the reference. One launch after another may use it on one stream."""
    layout = Layout.of(store)
    units, keys = rows * layers * layout.kv_heads, store.rings[0]
    of_tokens = score_workspace(rows, layers, layout.kv_heads, group, capacity, device)
    columns = max(4 * of_tokens.partial.shape[-1], 16)  # PARTS * PADDED, see `score_constants`
    parts, dtype = (units, strategies, columns), torch.float32
    if not multiplies_float32(keys):
        dtype = keys.dtype
    return PackedWorkspace(
        of_tokens,
        torch.empty((units, strategies, group, layout.columns), device=device),
        torch.empty((*parts, layout.columns), dtype=dtype, device=device),
        torch.empty(parts, device=device),
    )


def score_packed_step(
    store: PackedStore,
    queries: Tensor,
    rows: PagedRows,
    first_layer: int,
    scale: float,
    workspace: Any,
    out: Tensor,
) -> None:
    """See the reference, with a `PackedWorkspace`."""
    chunk = 2 * CHUNK_TOKENS
    layout, constants = Layout.of(store), score_constants(queries, workspace.of_tokens, out, chunk)
    key_ring, (chunks, units) = store.rings[0], score_grid(out, chunk)
    logits, partial = scratch(workspace.of_tokens, rounded=False)
    strategies = workspace.parts.shape[1]
    assert workspace.parts.shape[0] >= units
    assert workspace.parts.shape[2] == constants["PARTS"] * constants["PADDED"]
    rotated = (workspace.exact, workspace.parts, workspace.weights)
    rotate_queries(store, queries, rows.slots, first_layer, constants["PADDED"], rotated)
    _score[(chunks, units)](
        queries,
        workspace.parts,
        workspace.weights,
        in_words(store.keys),
        key_ring,
        store.strategy_of,
        store.rows,
        rows.slots,
        rows.positions,
        store.numbers,
        rows.page_table,
        logits=logits,
        partial=partial,
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
    strategy_of,
    rows,
    slots,
    positions,
    numbers,
    page_table,
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
    # Packed tokens, a run of one strategy after the other.
    first, last_packed = start, tl.minimum(stop, packed)
    while first < last_packed:
        strategy, last = run_at(unit_strategies, first, last_packed, CHUNK // LAYOUT.buffer, LAYOUT)
        table = tl.load(rows + slot * in_table + strategy).to(tl.int64) * LAYOUT.layers + layer
        of_unit = unit * strategies * PARTS * PADDED
        own_queries, weight = load_queries(
            query_parts + of_unit * LAYOUT.columns,
            query_weights + of_unit,
            strategy,
            PARTS * PADDED,
            LAYOUT,
        )
        score_vectors(
            keys,
            first=first,
            last=last,
            pages=pages,
            layer=layer,
            head=head,
            group=tl.load(numbers + table * 2 + 1),
            queries=own_queries,
            weight=weight * scale,
            unit_logits=unit_logits,
            PADDED=PADDED,
            PARTS=PARTS,
            VECTORS=VECTORS,
            LAYOUT=LAYOUT,
            EXACT=EXACT,
        )
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
