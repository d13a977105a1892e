"""Tokens are picked by the logits of their sketches, Triton.

The tokens of a unit, which is a request and a KV head, are in parts, and two launches have one
program a part. The first writes keys, and how often each key is among those that compete. The
second adds up the counts of all parts: they say what the k-th best key is, and where the picks of
its part go. So no program waits for another, and nothing depends on their order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.row_sketch.reference import KEY_MOST, KEY_UNIT, RowScratch

_PART_TOKENS = 2048
_PART_LOGITS = 8192
"""A part has so many tokens, or as many as have so many logits, if these are fewer."""

_WARPS = 8

_CHUNKS_AT_ONCE = tl.constexpr(64)
_PARTS_AT_ONCE = tl.constexpr(16)

_KEY_UNIT, _KEY_MOST = tl.constexpr(float(KEY_UNIT)), tl.constexpr(float(KEY_MOST))


def part_tokens(padded: int) -> int:
    """The tokens of a part, where a unit has so many query heads; at most 32767."""
    return min(_PART_TOKENS, _PART_LOGITS // padded)


def pick_by_logits(
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    group: int,
    chunk: int,
    sinks: int,
    recent: int,
    scratch: RowScratch,
    out: Tensor,
) -> None:
    """Pick the tokens of all sparse requests, whose logits and sums of chunks are in scratch.

    For parameters that are not here see `select_rows` of the reference. Two launches.

    Args:
        group: query heads of a KV head.
        chunk: tokens of which there is one sum.
    """
    requests, kv_heads, width = out.shape
    capacity, padded = scratch.logits.shape[1:]
    tokens = part_tokens(padded)
    parts = triton.cdiv(capacity, tokens)
    assert scratch.counts.shape[1] == parts
    grid = (parts, requests * kv_heads)
    constants = {"KV_HEADS": kv_heads, "SINKS": sinks, "RECENT": recent, "TOKENS": tokens}
    _finish[grid](
        slots,
        lengths,
        sparse_from,
        scratch.logits,
        scratch.sums,
        scratch.keys,
        scratch.counts,
        capacity,
        **constants,
        GROUP=group,
        PADDED=padded,
        CHUNK=chunk,
        num_warps=_WARPS,
    )
    _pick[grid](
        row_table,
        slots,
        lengths,
        sparse_from,
        scratch.keys,
        scratch.counts,
        out,
        capacity,
        row_table.stride(0),
        **constants,
        BUDGET=width - sinks - recent,
        ALWAYS=triton.next_power_of_2(sinks + recent),
        num_warps=_WARPS,
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "lengths", "sparse_from"])
def _finish(
    slots,
    lengths,
    sparse_from,
    logits,
    sums,
    keys,
    counts,
    capacity,
    KV_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program writes the keys of a part of a unit, and counts those that compete."""
    part, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + unit // KV_HEADS).to(tl.int64)
    length = tl.load(lengths + unit // KV_HEADS).to(tl.int32)
    start = part * TOKENS
    if (start < length) & (length >= tl.load(sparse_from + slot)):
        token = start + tl.arange(0, TOKENS)
        is_scored = token < length - 1
        at = (unit * capacity + token)[:, None] * PADDED + tl.arange(0, PADDED)[None, :]
        logit = tl.load(logits + at, mask=is_scored[:, None], other=0.0).to(tl.float32)
        shares = sums + unit * tl.cdiv(capacity, CHUNK) * 2 * PADDED
        log_sum = _log_sum(shares, tl.cdiv(length - 1, CHUNK), GROUP, PADDED)
        key = _to_keys(tl.max(logit - log_sum[None, :], axis=1))
        tl.store(keys + unit * capacity + token, key.to(tl.uint8), mask=is_scored)
        competes = (token >= SINKS) & (token < length - RECENT)
        count = tl.histogram(key, 256, mask=competes).to(tl.int16)
        own = unit * tl.cdiv(capacity, TOKENS) + part
        tl.store(counts + own * 256 + tl.arange(0, 256), count)


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
        total *= tl.exp(before - greatest)
        total += tl.sum(totals * tl.exp(maxima - greatest[None, :]), axis=0)
    return tl.where(heads < GROUP, greatest + tl.log(total), float("inf"))


@triton.jit
def _to_keys(scores):
    """See `to_keys` of the reference: int32."""
    keys = tl.clamp(scores * _KEY_UNIT + _KEY_MOST, 0.0, _KEY_MOST)
    keys = tl.where(scores == scores, keys, 0.0)
    # Of float32 numbers from 2^23 on the unit is 1, and to it sums are rounded, halves to even.
    return ((keys + 8388608.0) - 8388608.0).to(tl.int32)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["row_table", "slots", "lengths", "sparse_from"],
)
def _pick(
    row_table,
    slots,
    lengths,
    sparse_from,
    keys,
    counts,
    out,
    capacity,
    table_stride,
    KV_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    TOKENS: tl.constexpr,
    BUDGET: tl.constexpr,
    ALWAYS: tl.constexpr,
):
    """One program writes the rows of the tokens that are picked of a part of a unit."""
    part, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + unit // KV_HEADS).to(tl.int64)
    length = tl.load(lengths + unit // KV_HEADS).to(tl.int32)
    start, stop = part * TOKENS, length - RECENT
    if (start < length) & (length >= tl.load(sparse_from + slot)):
        rows = row_table + slot * table_stride
        target = out + unit * (SINKS + BUDGET + RECENT)
        if part == 0:
            always = tl.arange(0, ALWAYS)
            is_always = always < SINKS + RECENT
            token = tl.where(always < SINKS, always, stop + always - SINKS)
            row = tl.load(rows + token, mask=is_always)
            picks = tl.minimum(BUDGET, stop - SINKS)
            place = tl.where(always < SINKS, always, picks + always)
            tl.store(target + place, row, mask=is_always)

        # All rows are loaded, picked or not, so that nothing waits for them later.
        token = start + tl.arange(0, TOKENS)
        competes = (token >= SINKS) & (token < stop)
        key = tl.load(keys + unit * capacity + token, mask=token < length - 1, other=0)
        row = tl.load(rows + token, mask=competes, other=0)

        parts = tl.cdiv(capacity, TOKENS)
        bound, above, above_before, equal_before = _find_bound(
            counts + unit * parts * 256, tl.cdiv(length, TOKENS), part, BUDGET
        )
        is_above = (competes & (key > bound)).to(tl.int32)
        is_equal = (competes & (key == bound)).to(tl.int32)
        # Two sums in one: how many before each token are above the bound, and how many equal it.
        both = is_above + (is_equal << 16)
        before = tl.cumsum(both, axis=0) - both
        equal_wanted = BUDGET - above
        equal = equal_before + (before >> 16)
        place = SINKS + above_before + (before & 0xFFFF) + tl.minimum(equal, equal_wanted)
        is_picked = (is_above | (is_equal & (equal < equal_wanted))) != 0
        tl.store(target + place, row, mask=is_picked)


@triton.jit
def _find_bound(counts, parts, part, BUDGET: tl.constexpr):
    """Find the key of the BUDGET-th best, or 0 if there are fewer.

    Args:
        counts: (parts, 256) int16, of a unit.
        parts: how many have tokens.
        part: one of them.
        BUDGET: so many are wanted.

    Returns:
        bound: the key.
        above: how many keys are above it.
        above_before, equal_before: how many keys of earlier parts are above it, and equal it.
    """
    bins = tl.arange(0, 256)
    total = tl.zeros((256,), tl.int32)
    before = tl.zeros((256,), tl.int32)
    for first in range(0, parts, _PARTS_AT_ONCE):
        other = first + tl.arange(0, _PARTS_AT_ONCE)
        at = other[:, None] * 256 + bins[None, :]
        count = tl.load(counts + at, mask=(other < parts)[:, None], other=0).to(tl.int32)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where((other < part)[:, None], count, 0), axis=0)
    at_or_above = tl.cumsum(total, axis=0, reverse=True)
    bound = tl.max(tl.where(at_or_above >= BUDGET, bins, 0), axis=0)
    above = tl.sum(tl.where(bins > bound, total, 0), axis=0)
    above_before = tl.sum(tl.where(bins > bound, before, 0), axis=0)
    equal_before = tl.sum(tl.where(bins == bound, before, 0), axis=0)
    return bound, above, above_before, equal_before
