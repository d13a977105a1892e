"""Scores of packed keys, blocks first and then the tokens of the best blocks, Triton.

    _rotate     the queries, by the keys' rotation of each strategy of their sequence
    _score      logits of all tokens, those in blocks by their block, and scores of them
    _bound      of each kv head, the score that the wanted number of tokens reach
    _score      logits of these tokens by their own keys, and scores again

Where every token is scored by itself, the first two are all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from cache_rank_kernels.mosaickv.gathering import packed_tokens
from cache_rank_kernels.mosaickv.layout import Layout
from cache_rank_kernels.mosaickv.packing import load_rows
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

_BOUND_TOKENS = 2048
"""Looked at at once."""

MILLION = tl.constexpr(1_000_000)


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
    in_table = (store.strategy_of, store.rows, slots, positions)
    _rotate[(strategies, units)](
        queries,
        store.rotations,
        store.rows,
        slots,
        workspace.rotated,
        first_layer,
        strategies,
        LAYERS=constants["LAYERS"],
        GROUP=constants["GROUP"],
        ROWS=max(16, constants["PADDED"]),
        LAYOUT=layout,
    )
    for refines in (False,) if exact else (False, True):
        if refines:
            _bound[(units,)](
                out,
                store.strategy_of,
                slots,
                positions,
                workspace.bounds,
                workspace.oldest,
                *scored,
                out.shape[-1],
                UNITS=constants["LAYERS"] * layout.kv_heads,
                BLOCK=_BOUND_TOKENS,
                LAYOUT=layout,
                num_warps=8,
            )
        _score[(chunks, units)](
            queries,
            workspace.rotated,
            tuple(store.keys),
            tuple(store.block_keys),
            key_ring,
            *in_table,
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
            **constants,
            VECTORS=_VECTORS,
            BY_TOKEN=exact,
            REFINES=refines,
            LAYOUT=layout,
            EXACT=multiplies_float32(key_ring),
        )


@triton.jit(
    do_not_specialize=["first_layer", "strategies"],
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
    LAYERS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    strategy, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + unit // (LAYERS * LAYOUT.kv_heads)).to(tl.int64)
    is_strategy = (slot >= 0) & (strategy < LAYOUT.strategies)
    table = tl.load(rows + slot * LAYOUT.strategies + strategy, mask=is_strategy, other=-1)
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


@triton.jit
def _wanted(tokens, millionths, fewest):
    """How many tokens are scored by themselves."""
    share = (tokens.to(tl.int64) * millionths + (MILLION - 1)) // MILLION
    return tl.maximum(share, fewest).to(tl.int32)


@triton.jit
def _order_keys(scores):
    """Integers from 0 to 2^32 in the order of float32 scores."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit(
    do_not_specialize=["millionths", "fewest", "capacity"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def _bound(
    scores,
    strategy_of,
    slots,
    positions,
    bounds,
    oldest,
    millionths,
    fewest,
    capacity,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Of the tokens in the pages, newer ones first where scores are the same."""
    unit = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + unit // UNITS).to(tl.int64)
    if slot < 0:
        return
    tokens = tl.load(positions + unit // UNITS) + 1
    packed = packed_tokens(strategy_of + slot * LAYOUT.buffers, tokens, LAYOUT)
    wanted = _wanted(tokens, millionths, fewest)
    if wanted >= packed:
        return
    of_unit = scores + unit * capacity
    index = tl.arange(0, BLOCK)
    bound = tl.zeros((), tl.int64)
    step = tl.full((), 1 << 31, tl.int64)
    while step > 0:
        reached = tl.zeros((BLOCK,), tl.int32)
        for first in range(0, packed, BLOCK):
            is_token = first + index < packed
            score = tl.load(of_unit + first + index, mask=is_token, other=0.0)
            reached += (is_token & (_order_keys(score) >= bound + step)).to(tl.int32)
        bound = tl.where(tl.sum(reached) >= wanted, bound + step, bound)
        step = step >> 1
    above = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, packed, BLOCK):
        is_token = first + index < packed
        score = tl.load(of_unit + first + index, mask=is_token, other=0.0)
        above += (is_token & (_order_keys(score) > bound)).to(tl.int32)
    missing = wanted - tl.sum(above)
    last_tie = packed
    for turn in range(0, tl.cdiv(packed, BLOCK)):  # from the newest on
        token = (tl.cdiv(packed, BLOCK) - 1 - turn) * BLOCK + index
        score = tl.load(of_unit + token, mask=token < packed, other=0.0)
        is_tie = ((token < packed) & (_order_keys(score) == bound)).to(tl.int32)
        count = tl.sum(is_tie)
        newer = count - tl.cumsum(is_tie)
        found = tl.max(tl.where((newer + is_tie >= missing) & (is_tie > 0), token, -1))
        last_tie = tl.where((missing > 0) & (count >= missing), found, last_tie)
        missing -= count
    key = (bound - 2147483648).to(tl.int32)
    tl.store(bounds + unit, (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
    tl.store(oldest + unit, last_tie)


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
        *("first_layer", "page_stride", "capacity", "millionths", "fewest", "strategies"),
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
    unit_strategies = strategy_of + slot * LAYOUT.buffers
    packed = packed_tokens(unit_strategies, tokens, LAYOUT)
    in_blocks = (_wanted(tokens, millionths, fewest) < packed) & (not BY_TOKEN)
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
                row_of = tl.load(rows + slot * LAYOUT.strategies + strategy).to(tl.int64)
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
