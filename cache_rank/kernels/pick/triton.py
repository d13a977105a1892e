"""The tokens that a decode step attends to are picked from scores, Triton.

One program picks for one request and KV head, in three passes over its keys: a histogram of their
upper halves finds the half of the k-th best, a histogram of the lower halves of those that share it
finds its key, and the third pass writes, by prefix sums, what is above the key and enough of what
equals it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Keys that a program reads at a time."""

_WARPS = 16

_VECTOR = tl.constexpr(8)
"""A thread loads so many keys at once."""


def pick_tokens(
    keys: Tensor,
    row_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    sparse_from: Tensor,
    sinks: int,
    recent: int,
    out: Tensor,
) -> None:
    """See the reference. One launch."""
    requests, kv_heads, capacity = keys.shape
    assert keys.is_contiguous()
    assert out.is_contiguous()
    assert row_table.stride(1) == 1
    _pick[(requests * kv_heads,)](
        keys,
        row_table,
        slots,
        lengths,
        sparse_from,
        out,
        capacity,
        row_table.stride(0),
        KV_HEADS=kv_heads,
        SINKS=sinks,
        RECENT=recent,
        BUDGET=out.shape[-1] - sinks - recent,
        ALWAYS=triton.next_power_of_2(max(1, sinks + recent)),
        BLOCK=min(_BLOCK, triton.next_power_of_2(capacity)),
        num_warps=_WARPS,
    )


@triton.jit
def _best_bin(counts, wanted):
    """Find the bin that the `wanted`-th best is in, and how many are in better ones."""
    bins = tl.arange(0, 256)
    at_or_above = tl.cumsum(counts, axis=0, reverse=True)
    best = tl.max(tl.where(at_or_above >= wanted, bins, 0), axis=0)
    above = tl.sum(tl.where(bins > best, counts, 0), axis=0)
    return best, above


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["row_table", "slots", "lengths", "sparse_from"],
)
def _pick(
    keys,
    row_table,
    slots,
    lengths,
    sparse_from,
    out,
    capacity,
    table_stride,
    KV_HEADS: tl.constexpr,
    SINKS: tl.constexpr,
    RECENT: tl.constexpr,
    BUDGET: tl.constexpr,
    ALWAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program picks for one request and KV head."""
    unit = tl.program_id(0).to(tl.int64)
    request = unit // KV_HEADS
    slot = tl.load(slots + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    if length < tl.load(sparse_from + slot):
        return
    own_keys = keys + unit * capacity
    rows = row_table + slot * table_stride
    target = out + unit * (SINKS + BUDGET + RECENT)
    stop = length - RECENT

    # Sinks and recent tokens, which nobody picks.
    always = tl.arange(0, ALWAYS)
    is_always = always < SINKS + RECENT
    row = tl.load(rows + tl.where(always < SINKS, always, stop + always - SINKS), mask=is_always)
    picks = tl.minimum(BUDGET, stop - SINKS)
    tl.store(target + tl.where(always < SINKS, always, picks + always), row, mask=is_always)

    # The upper half of the key of the k-th best, and its lower half.
    in_block = tl.arange(0, BLOCK)
    load_stop = tl.minimum(tl.cdiv(stop, _VECTOR) * _VECTOR, capacity)
    counts = tl.zeros((256,), tl.int32)
    for block in range(0, stop, BLOCK):
        token = block + in_block
        competes = (token >= SINKS) & (token < stop)
        key = tl.load(own_keys + token, mask=token < load_stop, other=0).to(tl.int32)
        counts += tl.histogram(key >> 8, 256, mask=competes)
    upper, above_upper = _best_bin(counts, BUDGET)
    counts = tl.zeros((256,), tl.int32)
    for block in range(0, stop, BLOCK):
        token = block + in_block
        competes = (token >= SINKS) & (token < stop)
        key = tl.load(own_keys + token, mask=token < load_stop, other=0).to(tl.int32)
        counts += tl.histogram(key & 255, 256, mask=competes & (key >> 8 == upper))
    lower, above_lower = _best_bin(counts, BUDGET - above_upper)
    bound = (upper << 8) | lower
    equal_wanted = BUDGET - above_upper - above_lower

    above, equal = 0, 0
    for block in range(0, stop, BLOCK):
        token = block + in_block
        competes = (token >= SINKS) & (token < stop)
        key = tl.load(own_keys + token, mask=token < load_stop, other=0).to(tl.int32)
        is_above = (competes & (key > bound)).to(tl.int32)
        is_equal = (competes & (key == bound)).to(tl.int32)
        # Two sums in one: how many up to each token are above the key, and how many equal it.
        both = is_above + (is_equal << 16)
        up_to = tl.cumsum(both, axis=0)
        above_before = above + (up_to & 0xFFFF) - is_above
        equal_before = equal + (up_to >> 16) - is_equal
        is_picked = (is_above | (is_equal & (equal_before < equal_wanted))) != 0
        place = above_before + tl.minimum(equal_before, equal_wanted)
        picked = tl.load(rows + token, mask=is_picked)
        tl.store(target + SINKS + place, picked, mask=is_picked)
        total = tl.sum(both, axis=0)
        above += total & 0xFFFF
        equal += total >> 16
