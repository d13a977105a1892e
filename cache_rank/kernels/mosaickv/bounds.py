"""Which tokens of the best blocks are scored by their own keys, Triton.

Blocks are scored first (MosaicKV section 4.2, stage 2). A bound on these scores says which tokens
are then scored by themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cache_rank.kernels.mosaickv.packing import tokens_in_pages
from cache_rank.kernels.select.search import distance, search, thirds

BOUND_TOKENS = 8192
"""A program looks at this many tokens of a row at once."""

_LOWEST = tl.constexpr(-(2**31))
"""The key of a token that is not in the pages."""

_HIGHEST = tl.constexpr(0x7F800001)
"""One more than the key of an infinite score."""

_STRATEGIES = tl.constexpr(32)
"""A program looks at this many strategies at once."""


@triton.jit
def wanted_tokens(tokens, millionths, fewest):
    """How many tokens are scored by themselves."""
    share = (tokens.to(tl.int64) * millionths + 999999) // 1000000
    return tl.maximum(share, fewest).to(tl.int32)


@triton.jit
def list_wanted(scores, bound, oldest, first, last, listed, CHUNK: tl.constexpr):
    """List which of the tokens [first, last), at most CHUNK, are scored by themselves.

    Args:
        scores: the scores of the unit's tokens by their blocks.
        bound, oldest: what `bound_unit` wrote for the unit.
        listed: written, how far each of them is from the first one.

    Returns:
        How many they are.
    """
    tl.debug_barrier()  # the list may still be read
    index = tl.arange(0, CHUNK)
    token = first + index
    score = tl.load(scores + token, mask=token < last, other=-float("inf"))
    is_best = (score > bound) | ((score == bound) & (token >= oldest))
    wanted = ((token < last) & is_best).to(tl.int32)
    tl.store(listed + tl.cumsum(wanted) - wanted, index, mask=wanted > 0)
    tl.debug_barrier()
    return tl.sum(wanted)


@triton.jit
def _has_blocks(rows_of_slot, numbers, layer, strategies, LAYOUT: tl.constexpr):
    """Whether any strategy of a sequence scores a layer's tokens by blocks."""
    largest = tl.zeros((), tl.int32)
    for first in range(0, strategies, _STRATEGIES):
        index = first + tl.arange(0, _STRATEGIES)
        row = tl.load(rows_of_slot + index, mask=index < strategies, other=-1).to(tl.int64)
        at = (row * LAYOUT.layers + layer) * 3 + 2
        largest = tl.maximum(largest, tl.max(tl.load(numbers + at, mask=row >= 0, other=1)))
    return largest > 1


@triton.jit
def _load_keys(scores, token, packed):
    """Load int32 keys in the order of the scores; tokens beyond the pages get `_LOWEST`."""
    bits = (tl.load(scores + token, mask=token < packed, other=0.0) + 0.0).to(
        tl.int32, bitcast=True
    )
    return tl.where(token < packed, bits ^ ((bits >> 31) & 0x7FFFFFFF), _LOWEST)


@triton.jit
def _narrowed(scores, packed, wanted, BLOCK: tl.constexpr):
    """Find an interval with the key that `wanted` tokens reach, and few other keys.

    Returns:
        Its ends, where fewer tokens than wanted reach the second; how many those are; and how many
        keys are in the interval, which are more than BLOCK only where they are all the same.
    """
    low, high = tl.full((), _LOWEST, tl.int32), tl.full((), _HIGHEST, tl.int32)
    reach_low, reach_high = packed, tl.zeros((), tl.int32)
    index = tl.arange(0, BLOCK)
    while (reach_low - reach_high > BLOCK) & (distance(low, high) > 1):
        first, second = thirds(low, high)
        by_first, by_second = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for start in range(0, packed, BLOCK):
            key = _load_keys(scores, start + index, packed)
            by_first += (key >= first).to(tl.int32)
            by_second += (key >= second).to(tl.int32)
        reach_first, reach_second = tl.sum(by_first), tl.sum(by_second)
        high = tl.where(reach_second < wanted, second, high)
        reach_high = tl.where(reach_second < wanted, reach_second, reach_high)
        high = tl.where(reach_first < wanted, first, high)
        reach_high = tl.where(reach_first < wanted, reach_first, reach_high)
        low = tl.where(reach_first >= wanted, first, low)
        reach_low = tl.where(reach_first >= wanted, reach_first, reach_low)
        low = tl.where(reach_second >= wanted, second, low)
        reach_low = tl.where(reach_second >= wanted, reach_second, reach_low)
    return low, high, reach_high, reach_low - reach_high


@triton.jit
def _found_among(scores, packed, low, high, wanted, listed, BLOCK: tl.constexpr):
    """Find the highest key in an interval that `wanted` of the keys in it reach.

    `listed` is scratch for at most BLOCK keys.
    """
    index, count = tl.arange(0, BLOCK), tl.zeros((), tl.int32)
    for start in range(0, packed, BLOCK):
        key = _load_keys(scores, start + index, packed)
        inside = ((start + index < packed) & (key >= low) & (key < high)).to(tl.int32)
        tl.store(listed + count + tl.cumsum(inside) - inside, key, mask=inside > 0)
        count += tl.sum(inside)
    tl.debug_barrier()
    keys = tl.load(listed + index, mask=index < count, other=_LOWEST)
    return search((keys,), low, high, wanted, wanted)


@triton.jit
def _oldest_of(scores, packed, bound, wanted, BLOCK: tl.constexpr):
    """Find the oldest token that is wanted among those whose key is the bound."""
    index = tl.arange(0, BLOCK)
    above = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, packed, BLOCK):
        above += (_load_keys(scores, start + index, packed) > bound).to(tl.int32)
    missing, oldest = wanted - tl.sum(above), packed
    start = tl.cdiv(packed, BLOCK) * BLOCK
    while (missing > 0) & (start > 0):  # from the newest on
        start -= BLOCK
        token = start + index
        is_tie = _load_keys(scores, token, packed) == bound
        ties = (is_tie & (token < packed)).to(tl.int32)
        count = tl.sum(ties)
        if count >= missing:
            newer = count - tl.cumsum(ties)
            oldest = tl.max(tl.where((newer + ties >= missing) & (ties > 0), token, -1))
        missing -= count
    return oldest


@triton.jit(
    do_not_specialize=[
        *("first_layer", "millionths", "fewest", "capacity", "strategies"),
        *("buffers", "in_table"),
    ],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def bound_unit(
    scores,
    strategy_of,
    rows,
    numbers,
    slots,
    positions,
    listed,
    bounds,
    oldest,
    first_layer,
    millionths,
    fewest,
    capacity,
    strategies,
    buffers,
    in_table,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """One program writes which tokens of a unit are scored by themselves.

    A unit is a row, layer and kv head. As many tokens as are wanted, of those in the pages, are
    scored by themselves: those with a score above the bound, and the newest of those whose score is
    the bound. The bound is infinite where as many tokens are wanted as are in the pages, or none of
    them is in a block. Nothing is written for a row of slot -1.

    Args:
        scores: (units, capacity) float32, the scores of tokens by their blocks.
        strategy_of, rows, numbers: see `PackedStore`.
        slots, positions: (R,) int32, those of each row.
        listed: (units, capacity) int32 scratch.
        bounds: (units,) float32, written: the score that as many tokens reach as are wanted.
        oldest: (units,) int32, written: the oldest token that is wanted of those with that score.
        first_layer: index of the first of the LAYERS layers in the store.
        millionths: how many millionths of a row's tokens are wanted.
        fewest: how many tokens of any row are wanted at least.
        capacity: row length of `scores` and `listed`, a multiple of 16.
        strategies: how many strategies a sequence has at most.
        buffers, in_table: row lengths of `strategy_of` and `rows`.
        BLOCK: how many tokens are looked at at once.
    """
    # How many tokens are wanted, and whether any of them are in blocks.
    unit = tl.program_id(0).to(tl.int64)
    row = unit // (LAYERS * LAYOUT.kv_heads)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    tokens = tl.load(positions + row) + 1
    packed = tokens_in_pages(strategy_of + slot * buffers, tokens, LAYOUT)
    wanted = wanted_tokens(tokens, millionths, fewest)
    layer = first_layer + unit // LAYOUT.kv_heads % LAYERS
    most = tl.minimum(strategies, in_table)
    in_blocks = _has_blocks(rows + slot * in_table, numbers, layer, most, LAYOUT)
    if (wanted >= packed) | (in_blocks == 0):
        tl.store(bounds + unit, float("inf"))
        return
    # The key of the bound, from an interval with few keys, and the oldest token that has it.
    start = tl.multiple_of(unit * capacity, 16)
    of_unit = scores + start
    bound, high, reach_high, count = _narrowed(of_unit, packed, wanted, BLOCK)
    if count <= BLOCK:
        bound = _found_among(
            of_unit, packed, bound, high, wanted - reach_high, listed + start, BLOCK
        )
    last = _oldest_of(of_unit, packed, bound, wanted, BLOCK)
    key = bound ^ ((bound >> 31) & 0x7FFFFFFF)
    tl.store(bounds + unit, key.to(tl.float32, bitcast=True))
    tl.store(oldest + unit, last)
