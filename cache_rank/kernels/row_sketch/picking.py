"""Tokens are picked by the logits of their sketches, Triton.

One program picks for one unit, which is a request and a KV head. It turns logits into keys, halves
the range of keys until it knows the k-th best, and writes, by one prefix sum, the rows of what is
above it and of enough that equals it. Comparisons take eight sums; a histogram of keys would take
as long as its fullest bin, and most keys are in few.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.row_sketch.reference import KEY_MOST, KEY_UNIT, RowScratch

_HELD = 32768
"""A program holds the keys of so many tokens in registers, and reads those of more again."""

_BLOCK = 8192
"""It writes rows of so many tokens at a time."""

_PART_LOGITS = 32768
"""It turns so many logits into keys at a time."""

_CHUNKS_AT_ONCE = tl.constexpr(64)

_KEY_UNIT, _KEY_MOST = tl.constexpr(float(KEY_UNIT)), tl.constexpr(float(KEY_MOST))
_LN_2 = tl.constexpr(0.6931471805599453)


def pick_by_logits(
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    budgets: Tensor,
    group: int,
    chunk: int,
    sinks: int,
    recent: int,
    scratch: RowScratch,
    out: Tensor,
) -> None:
    """Pick the tokens of all sparse requests, whose logits and sums of chunks are in scratch.

    For parameters that are not here see `select_rows` of the reference. One launch.

    Args:
        group: query heads of a KV head.
        chunk: tokens of which there is one sum.
    """
    requests, kv_heads, width = out.shape
    capacity, padded = scratch.logits.shape[1:]
    most = width - sinks - recent
    assert most < 1 << 16
    held = min(_HELD, triton.next_power_of_2(capacity))
    block = min(_BLOCK, held)
    _pick[(requests * kv_heads,)](
        row_table,
        slots,
        lengths,
        sparse_from,
        budgets,
        scratch.logits,
        scratch.sums,
        scratch.keys,
        out,
        capacity,
        row_table.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        PADDED=padded,
        CHUNK=chunk,
        SINKS=sinks,
        RECENT=recent,
        MOST=most,
        ALWAYS=triton.next_power_of_2(sinks + recent),
        PART=min(block, _PART_LOGITS // padded),
        HELD=held,
        BLOCK=block,
        num_warps=min(32, max(4, held // 1024)),
    )


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["row_table", "slots", "lengths", "sparse_from", "budgets"],
)
def _pick(
    row_table,
    slots,
    lengths,
    sparse_from,
    budgets,
    logits,
    sums,
    keys,
    out,
    capacity,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    MOST: tl.constexpr,
    ALWAYS: tl.constexpr,
    PART: tl.constexpr,
    HELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program picks for one unit."""
    unit = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + unit // KV_HEADS).to(tl.int64)
    length = tl.load(lengths + unit // KV_HEADS).to(tl.int32)
    if length < tl.load(sparse_from + slot):
        return
    budget = tl.load(budgets + unit // KV_HEADS)
    rows = row_table + slot * table_stride
    target = out + unit * (SINKS + MOST + RECENT)
    stop = length - RECENT

    # Sinks and recent tokens, which nobody picks.
    always = tl.arange(0, ALWAYS)
    is_always = always < SINKS + RECENT
    token = tl.where(always < SINKS, always, stop + always - SINKS)
    row = tl.load(rows + token, mask=is_always)
    picks = tl.minimum(budget, stop - SINKS)
    tl.store(target + tl.where(always < SINKS, always, picks + always), row, mask=is_always)

    # Logits become keys.
    own_keys = keys + unit * capacity
    heads = tl.arange(0, PADDED)
    shares = sums + unit * tl.cdiv(capacity, CHUNK) * 2 * PADDED
    log_sum = _log_sum(shares, tl.cdiv(length - 1, CHUNK), GROUP, PADDED)
    for start in range(0, stop, PART):
        scored = start + tl.arange(0, PART)
        at = (unit * capacity + scored)[:, None] * PADDED + heads[None, :]
        logit = tl.load(logits + at, mask=(scored < stop)[:, None], other=0.0).to(tl.float32)
        scores = tl.max(logit - log_sum[None, :], axis=1)
        tl.store(own_keys + scored, _to_keys(scores).to(tl.uint8), mask=scored < stop)
    tl.debug_barrier()

    # The largest key that, with those above it, as many tokens as the budget have; or 0.
    held = _load_keys(own_keys, 0, stop, SINKS, HELD)
    bound = 0
    for halving in tl.static_range(8):
        candidate = bound + (128 >> halving)
        count = tl.sum((held >= candidate).to(tl.int32), axis=0)
        for block in range(HELD, stop, BLOCK):
            more = _load_keys(own_keys, block, stop, SINKS, BLOCK)
            count += tl.sum((more >= candidate).to(tl.int32), axis=0)
        bound = tl.where(count >= budget, candidate, bound)
    above = tl.sum((held > bound).to(tl.int32), axis=0)
    for block in range(HELD, stop, BLOCK):
        more = _load_keys(own_keys, block, stop, SINKS, BLOCK)
        above += tl.sum((more > bound).to(tl.int32), axis=0)
    equal_wanted = budget - above

    above_before, equal_before = 0, 0
    for block in range(0, stop, BLOCK):
        key = _load_keys(own_keys, block, stop, SINKS, BLOCK)
        is_above = (key > bound).to(tl.uint32)
        is_equal = (key == bound).to(tl.uint32)
        # Two sums in one: how many up to each token are above the bound, and how many equal it.
        both = is_above + (is_equal << 16)
        before = tl.cumsum(both, axis=0) - both
        equal = equal_before + (before >> 16).to(tl.int32)
        place = above_before + (before & 0xFFFF).to(tl.int32) + tl.minimum(equal, equal_wanted)
        is_picked = (key > bound) | ((key == bound) & (equal < equal_wanted))
        picked = tl.load(rows + block + tl.arange(0, BLOCK), mask=is_picked, other=0)
        tl.store(target + SINKS + place, picked, mask=is_picked)
        above_before += tl.sum(is_above.to(tl.int32), axis=0)
        equal_before += tl.sum(is_equal.to(tl.int32), axis=0)


@triton.jit
def _load_keys(own_keys, block, stop, SINKS: tl.constexpr, BLOCK: tl.constexpr):
    """The keys of BLOCK tokens, int32; -1 where a token does not compete."""
    token = block + tl.arange(0, BLOCK)
    competes = (token >= SINKS) & (token < stop)
    key = tl.load(own_keys + token, mask=token < stop, other=0).to(tl.int32)
    return tl.where(competes, key, -1)


@triton.jit
def _log_sum(shares, chunks, GROUP: tl.constexpr, PADDED: tl.constexpr):
    """The log-sum-exp of each head, (PADDED,) float32; infinite for what is no head.

    Args:
        shares: (chunks, 2, PADDED) float32, see `RowScratch.sums`.
        chunks: how many have tokens.
    """
    heads = tl.arange(0, PADDED)
    greatest = tl.full((PADDED,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    for first in range(0, chunks, _CHUNKS_AT_ONCE):
        chunk = first + tl.arange(0, _CHUNKS_AT_ONCE)
        at = chunk[:, None] * 2 * PADDED + heads[None, :]
        is_used = (chunk < chunks)[:, None]
        maxima = tl.load(shares + at, mask=is_used, other=-float("inf"))
        totals = tl.load(shares + PADDED + at, mask=is_used, other=0.0)
        before, greatest = greatest, tl.maximum(greatest, tl.max(maxima, axis=0))
        total *= tl.exp2(before - greatest)
        total += tl.sum(totals * tl.exp2(maxima - greatest[None, :]), axis=0)
    return tl.where(heads < GROUP, (greatest + tl.log2(total)) * _LN_2, float("inf"))


@triton.jit
def _to_keys(scores):
    """See `to_keys` of the reference: int32."""
    keys = tl.clamp(scores * _KEY_UNIT + _KEY_MOST, 0.0, _KEY_MOST)
    keys = tl.where(scores == scores, keys, 0.0)
    # Of float32 numbers from 2^23 on the unit is 1, and to it sums are rounded, halves to even.
    return ((keys + 8388608.0) - 8388608.0).to(tl.int32)
