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
from cache_rank_kernels.mosaickv.bounds import BOUND_TOKENS, bound_unit, wanted_tokens
from cache_rank_kernels.mosaickv.layout import Layout
from cache_rank_kernels.mosaickv.packing import load_rows, tokens_in_pages
from cache_rank_kernels.mosaickv.queries import rotate_queries
from cache_rank_kernels.mosaickv.store import PackedStore
from cache_rank_kernels.score.reference import ScoreWorkspace
from cache_rank_kernels.score.triton import (
    finish_unit,
    load_query_parts,
    multiplies_float32,
    score_constants,
    score_full_precision,
    score_grid,
    score_workspace,
    store_logits,
)
from torch import Tensor

_VECTORS = 32
"""Multiplied at once."""


class PackedWorkspace(NamedTuple):
    """Scratch of `score_packed_step`.

    Attributes:
        of_tokens: as of other formats.
        rotated: (units, strategies, G, columns) float32 queries.
        bounds: (units,) float32 scores.
        oldest: (units,) int32, of the tokens with such a score the oldest that is scored.
    """

    of_tokens: ScoreWorkspace
    rotated: Tensor
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
    units = rows * layers * layout.kv_heads
    return PackedWorkspace(
        score_workspace(rows, layers, layout.kv_heads, group, capacity, device),
        torch.empty((units, strategies, group, layout.columns), device=device),
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
    """See the reference. Four launches, or two where all tokens are scored by themselves."""
    layout, constants = Layout.of(store), score_constants(queries, workspace.of_tokens, out)
    key_ring, (chunks, units) = store.rings[0], score_grid(out)
    strategies = workspace.rotated.shape[1]
    assert workspace.rotated.shape[0] >= units
    rotate_queries(store, queries, slots, first_layer, workspace.rotated)
    for refines in (False,) if exact else (False, True):
        if refines:
            bound_unit[(units,)](
                out,
                store.strategy_of,
                slots,
                positions,
                workspace.bounds,
                workspace.oldest,
                *scored,
                out.shape[-1],
                store.strategy_of.shape[1],
                UNITS=constants["LAYERS"] * layout.kv_heads,
                BLOCK=BOUND_TOKENS,
                LAYOUT=layout,
                num_warps=16,
            )
        _score[(chunks, units)](
            queries,
            workspace.rotated,
            tuple(store.keys),
            tuple(store.block_keys),
            key_ring,
            store.strategy_of,
            store.rows,
            slots,
            positions,
            store.numbers,
            page_table,
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
        )


@triton.jit
def _score_strategy(
    strategy,
    in_blocks,
    start,
    packed,
    tile,
    keys,
    block_keys,
    unit_strategies,
    table,
    rotated,
    refining,
    scale,
    unit_logits,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    VECTORS: tl.constexpr,
    REFINES: tl.constexpr,
    LAYOUT: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Logits of the tokens of a page that have a strategy.

    Args:
        strategy: of the sequence.
        in_blocks: whether tokens are scored by blocks.
        start, packed: the page's first token, and the end of those in pages.
        tile: (page, layer, kv head).
        table: r, g and the tokens of a block.
        rotated: the unit's queries for the strategy, (GROUP, columns) float32.
        refining: the unit's scores, and the bounds of those whose tokens are to be scored.
    """
    group, block = tl.load(table + 1), tl.load(table + 2)
    elements, bitmap = keys
    page_entries, stride = LAYOUT.page, 1
    if in_blocks & (block > 1):
        elements, bitmap = block_keys
        page_entries, stride = LAYOUT.page_blocks, block
    dtype: tl.constexpr = tl.float32 if EXACT else elements.dtype.element_ty
    parts, weight = load_query_parts(rotated, GROUP, PADDED, PARTS, LAYOUT.columns, dtype, 128.0)
    parts, weight = tl.trans(parts), weight * scale
    index = tl.arange(0, VECTORS) * stride
    for first in range(0, LAYOUT.page, VECTORS * stride):
        in_page = first + index
        token = start + in_page
        is_token = (in_page < LAYOUT.page) & (token < packed)
        other = tl.load(unit_strategies + token // LAYOUT.buffer, mask=is_token, other=-1)
        used = other == strategy
        if REFINES:
            scores, bound, oldest = refining
            score = tl.load(scores + token, mask=used, other=-float("inf"))
            is_best = (score > bound) | ((score == bound) & (token >= oldest))
            used = used & is_best & (block > 1)
        if tl.max(used.to(tl.int32), axis=0) > 0:
            entry = tile * page_entries + in_page * page_entries // LAYOUT.page
            key = load_rows(
                elements,
                bitmap,
                entry,
                used,
                group,
                LAYOUT.kept,
                LAYOUT.bytes,
                LAYOUT.channels,
                LAYOUT.columns,
            )
            product = tl.dot(key.to(dtype), parts, input_precision="ieee") * weight[None, :]
            logit = tl.sum(tl.reshape(product, (VECTORS, PARTS, PADDED)), axis=1)
            for place in range(stride):
                store_logits(logit, token + place, used, unit_logits, PADDED)


@triton.jit(
    do_not_specialize=[
        *("first_layer", "page_stride", "capacity", "millionths", "fewest"),
        *("strategies", "buffers", "in_table"),
    ],
    do_not_specialize_on_alignment=["page_table", "slots", "positions"],
)
def _score(
    queries,
    rotated,
    keys,
    block_keys,
    key_ring,
    strategy_of,
    rows,
    slots,
    positions,
    numbers,
    page_table,
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
    MAX_CHUNKS: tl.constexpr,
    FINISH_BLOCK: tl.constexpr,
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
    if REFINES & (in_blocks == 0):
        return
    layer, head = first_layer + (unit // KV_HEADS) % LAYERS, unit % KV_HEADS
    unit_logits = logits + unit * capacity * PADDED
    unit_out = out + unit * capacity
    stop = tl.minimum(start + CHUNK, tokens)
    refining = None
    if REFINES:
        refining = (unit_out, tl.load(bounds + unit), tl.load(oldest + unit))
    buffer = tl.arange(0, LAYOUT.page // LAYOUT.buffer)
    for page_start in range(start, tl.minimum(stop, packed), LAYOUT.page):
        is_packed = page_start + buffer * LAYOUT.buffer < packed
        own = page_start // LAYOUT.buffer + buffer
        of_page = tl.load(unit_strategies + own, mask=is_packed, other=-1)
        page = tl.load(page_table + row * page_stride + page_start // LAYOUT.page).to(tl.int64)
        tile = (page * LAYOUT.layers + layer) * KV_HEADS + head
        for turn in range(LAYOUT.page // LAYOUT.buffer):
            strategy = tl.sum(tl.where(buffer == turn, of_page, 0), axis=0)
            earlier = tl.sum(((of_page == strategy) & (buffer < turn)).to(tl.int32), axis=0)
            if (strategy >= 0) & (earlier == 0):
                row_of = tl.load(rows + slot * in_table + strategy).to(tl.int64)
                _score_strategy(
                    strategy,
                    in_blocks & (not REFINES),
                    page_start,
                    packed,
                    tile,
                    keys,
                    block_keys,
                    unit_strategies,
                    numbers + (row_of * LAYOUT.layers + layer) * 3,
                    rotated + (unit * strategies + strategy) * GROUP * LAYOUT.columns,
                    refining,
                    scale,
                    unit_logits,
                    GROUP,
                    PADDED,
                    PARTS,
                    VECTORS,
                    REFINES,
                    LAYOUT,
                    EXACT,
                )
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
        MAX_CHUNKS,
        FINISH_BLOCK,
    )
