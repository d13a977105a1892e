"""Scores of packed keys, blocks first and then the tokens of the best blocks, Triton.

    rotate_queries  by the rotation of each strategy of their sequence
    _score          logits of all tokens, those in blocks by their block, and scores of them
    bound_unit      of each kv head, the score that the wanted number of tokens reach
    _score          logits of these tokens by their own keys, and scores again

Where every token is scored by itself, the first two are all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from cache_rank_kernels.mosaickv.bounds import (
    BOUND_TOKENS,
    bound_unit,
    list_wanted,
    wanted_tokens,
)
from cache_rank_kernels.mosaickv.layout import Layout
from cache_rank_kernels.mosaickv.logits import load_queries, run_at, score_vectors
from cache_rank_kernels.mosaickv.packing import tokens_in_pages
from cache_rank_kernels.mosaickv.queries import RotatedQueries, rotate_queries, rotated_queries
from cache_rank_kernels.mosaickv.store import PackedStore
from cache_rank_kernels.mosaickv.unpacking import in_words
from cache_rank_kernels.score.reference import ScoreWorkspace
from cache_rank_kernels.score.triton import (
    finish_unit,
    multiplies_float32,
    score_constants,
    score_full_precision,
    score_grid,
    score_workspace,
)
from torch import Tensor

_VECTORS = 64
"""Multiplied at once, by four warps."""

_REGISTERS = 168
"""Of a thread, so that three programs share a multiprocessor: what they wait for is memory."""


class PackedWorkspace(NamedTuple):
    """Scratch of `score_packed_step`.

    Attributes:
        of_tokens: as of other formats.
        rotated: queries of each unit and strategy.
        listed: (units, capacity) int32, of each chunk the tokens that are scored by themselves.
        bounds: (units,) float32 scores.
        oldest: (units,) int32, of the tokens with such a score the oldest that is scored.
    """

    of_tokens: ScoreWorkspace
    rotated: RotatedQueries
    listed: Tensor
    bounds: Tensor
    oldest: Tensor


def score_packed_workspace(
    store: PackedStore,
    rows: int,
    layers: int,
    group: int,
    capacity: int,
    strategies: int,
) -> PackedWorkspace:
    """Scratch for `rows` rows of up to `capacity` tokens and `strategies` strategies.

    It may be used by one launch after another on one stream.
    """
    layout, device = Layout.of(store), store.strategy_of.device
    units, exact = rows * layers * layout.kv_heads, multiplies_float32(store.rings[0])
    of_tokens = score_workspace(rows, layers, layout.kv_heads, group, capacity, device)
    columns = max(4 * of_tokens.logits.shape[-1], 16)  # of a product, see `score_constants`
    return PackedWorkspace(
        of_tokens,
        rotated_queries(store, units, strategies, group, columns, exact),
        torch.empty((units, capacity), dtype=torch.int32, device=device),
        torch.empty(units, device=device),
        torch.empty(units, dtype=torch.int32, device=device),
    )


def score_packed_step(
    store: PackedStore,
    queries: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    scale: float,
    scored: tuple[int, int],
    workspace: PackedWorkspace,
    out: Tensor,
    exact: bool = False,
) -> None:
    """See the reference, with a capacity that 16 divides.

    Four launches, or two where all tokens are scored by themselves.
    """
    layout, constants = Layout.of(store), score_constants(queries, workspace.of_tokens, out)
    key_ring, (chunks, units) = store.rings[0], score_grid(out)
    rotated = workspace.rotated
    strategies = rotated.parts.shape[1]
    assert out.shape[-1] % 16 == 0
    assert rotated.parts.shape[0] >= units
    assert rotated.parts.shape[2] == constants["PARTS"] * constants["PADDED"]
    rotate_queries(store, queries, slots, first_layer, constants["PADDED"], rotated)
    for refines in (False,) if exact else (False, True):
        if refines:
            bound_unit[(units,)](
                out,
                store.strategy_of,
                store.rows,
                store.numbers,
                slots,
                positions,
                workspace.listed,
                workspace.bounds,
                workspace.oldest,
                first_layer,
                *scored,
                out.shape[-1],
                strategies,
                store.strategy_of.shape[1],
                store.rows.shape[1],
                LAYERS=constants["LAYERS"],
                BLOCK=BOUND_TOKENS,
                LAYOUT=layout,
                num_warps=16,
            )
        _score[(chunks, units)](
            queries,
            rotated.parts,
            rotated.weights,
            in_words(store.keys),
            in_words(store.block_keys),
            key_ring,
            store.strategy_of,
            store.rows,
            slots,
            positions,
            store.numbers,
            page_table,
            workspace.listed,
            workspace.bounds,
            workspace.oldest,
            *workspace.of_tokens,
            out,
            first_layer,
            scale,
            page_table.stride(0),
            out.shape[-1],
            *scored,
            strategies,
            store.strategy_of.shape[1],
            store.rows.shape[1],
            **constants,
            VECTORS=_VECTORS,
            BY_TOKEN=exact,
            REFINES=refines,
            LAYOUT=layout,
            EXACT=multiplies_float32(key_ring),
            maxnreg=_REGISTERS,
        )


@triton.jit(
    do_not_specialize=[
        *("first_layer", "page_stride", "capacity", "millionths", "fewest"),
        *("strategies", "buffers", "in_table"),
    ],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _score(
    queries,
    query_parts,
    query_weights,
    keys,
    block_keys,
    key_ring,
    strategy_of,
    rows,
    slots,
    positions,
    numbers,
    page_table,
    listed,
    bounds,
    oldest,
    logits,
    partial,
    arrived,
    out,
    first_layer,
    scale,
    page_stride,
    capacity,
    millionths,
    fewest,
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
    BY_TOKEN: tl.constexpr,
    REFINES: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    chunk, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    slot = tl.load(slots + row).to(tl.int64)
    tokens = tl.load(positions + row) + 1
    start = chunk * CHUNK
    if (slot < 0) | (start >= tokens):
        return
    unit_strategies = strategy_of + slot * buffers
    packed = tokens_in_pages(unit_strategies, tokens, LAYOUT)
    in_blocks = (wanted_tokens(tokens, millionths, fewest) < packed) & (not BY_TOKEN)
    bound = float("inf")
    if REFINES:
        bound = tl.load(bounds + unit)
        if bound == float("inf"):
            return
    layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
    unit_logits = logits + unit * capacity * PADDED
    unit_out = out + unit * capacity
    chunk_list = listed + unit * capacity + start
    pages = page_table + row * page_stride
    stop = tl.minimum(start + CHUNK, tokens)
    first, last_packed = start, tl.minimum(stop, packed)
    while first < last_packed:
        strategy, last = run_at(unit_strategies, first, last_packed, CHUNK // LAYOUT.buffer, LAYOUT)
        table = tl.load(rows + slot * in_table + strategy).to(tl.int64) * LAYOUT.layers + layer
        group, block = tl.load(numbers + table * 3 + 1), tl.load(numbers + table * 3 + 2)
        elements, bitmap = keys
        page_entries, stride, count = LAYOUT.page, 1, last - first
        if REFINES:
            count = 0
            if block > 1:
                count = list_wanted(
                    unit_out, bound, tl.load(oldest + unit), first, last, chunk_list, CHUNK
                )
        elif in_blocks & (block > 1):
            elements, bitmap = block_keys
            page_entries, stride, count = LAYOUT.page_blocks, block, (last - first) // block
        of_unit = unit * strategies * PARTS * PADDED
        own_queries, weight = load_queries(
            query_parts + of_unit * LAYOUT.columns,
            query_weights + of_unit,
            strategy,
            PARTS * PADDED,
            LAYOUT,
        )
        score_vectors(
            (elements, bitmap),
            first,
            count,
            stride,
            chunk_list,
            pages,
            layer,
            head,
            page_entries,
            group,
            own_queries,
            weight * scale,
            unit_logits,
            PADDED,
            PARTS,
            VECTORS,
            REFINES,
            LAYOUT,
            EXACT,
        )
        first = last
    if (not REFINES) & (packed < stop):
        score_full_precision(
            queries + unit * GROUP * HEAD_DIM,
            key_ring,
            slots + row,
            tl.maximum(packed, start),
            stop,
            layer,
            head,
            scale,
            LAYOUT.layers,
            unit_logits,
            KV_HEADS,
            GROUP,
            PADDED,
            PARTS,
            HEAD_DIM,
            LAYOUT.ring,
            LAYOUT.buffer,
            True,
            1,
            EXACT,
            False,
        )
    finish_unit(
        chunk,
        tokens,
        unit_logits,
        partial + unit * tl.cdiv(capacity, CHUNK) * 2 * PADDED,
        arrived + unit,
        unit_out,
        GROUP,
        PADDED,
        CHUNK,
    )
