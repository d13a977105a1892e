"""Which tokens of the best blocks are scored by themselves, Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from cache_rank_kernels.mosaickv.packing import tokens_in_pages

BOUND_TOKENS = 8192
"""Tokens of a row that are looked at at once."""


@triton.jit
def wanted_tokens(tokens, millionths, fewest):
    """How many tokens are scored by themselves."""
    share = (tokens.to(tl.int64) * millionths + 999999) // 1000000
    return tl.maximum(share, fewest).to(tl.int32)


@triton.jit
def _order_keys(scores):
    """Integers from 0 to 2^32 in the order of float32 scores."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit(
    do_not_specialize=["millionths", "fewest", "capacity", "buffers"],
    do_not_specialize_on_alignment=["slots", "positions"],
)
def bound_unit(
    scores,
    strategy_of,
    slots,
    positions,
    bounds,
    oldest,
    millionths,
    fewest,
    capacity,
    buffers,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Write which tokens of a unit, a row's kv head of a layer, are scored by themselves.

    These are the wanted number of the tokens in the pages: those with a score above the bound, and
    of those whose score is the bound, the newest. Nothing is written of a row of slot -1, nor where
    no fewer tokens are wanted than are in the pages.

    Args:
        scores: (units, capacity) float32, of tokens by their blocks.
        strategy_of: (slots, buffers) int32, see `PackedStore`.
        slots, positions: (R,) int32, of each row.
        bounds: (units,) float32, written: the score that the wanted number of tokens reach.
        oldest: (units,) int32, written: of the tokens with that score, the oldest that is wanted.
        millionths: of a row's tokens, that are wanted.
        fewest: tokens that are wanted of any row.
        capacity, buffers: row lengths of `scores` and `strategy_of`.
        UNITS: of a row.
        BLOCK: tokens that are looked at at once.
    """
    unit = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + unit // UNITS).to(tl.int64)
    if slot < 0:
        return
    tokens = tl.load(positions + unit // UNITS) + 1
    packed = tokens_in_pages(strategy_of + slot * buffers, tokens, LAYOUT)
    wanted = wanted_tokens(tokens, millionths, fewest)
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
