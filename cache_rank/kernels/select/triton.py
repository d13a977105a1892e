"""The tokens of a working set are selected, Triton.

Sorting a row would be far too slow, so thresholds are found by search: count how many keys are at
or above two probes, and keep a third of the interval. To count over the whole row each time would
still be too slow. The row is therefore read once for the maxima of strided groups of tokens, which
stay in registers. If `n` group maxima are at or above some key, so are the `n` best tokens: a bound
that leaves few more tokens than needed. They are listed in a second pass, which skips the groups
below the bound, and the exact thresholds are found on the list, which fits into registers too.

A working set hardly changes from step to step, so tokens in slots are taken out of the row first
and counted apart. The list then holds those of the best that are in no slot, which are few.

Counting is bound by instructions. So all that is in registers is in vectors of one width, which
makes a count one sum; and it is 32-bit keys, with the tokens, which decide ties, beside them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.select.exchanging import LOWEST, append, exchange
from cache_rank.kernels.select.reference import MOST_SLOTS
from cache_rank.kernels.select.search import distance, narrow, reaching, search, thirds

_FLOOR = tl.constexpr(-(2**31) + 1)
"""The key of a NaN, the lowest of a token that competes."""

_LOWEST_RANK = tl.constexpr(-(2**63))
"""The rank of a token that does not compete."""

_RESIDENT = tl.constexpr(-1)
"""The bits of the score of a token in a slot: a NaN that no arithmetic produces."""


def _default_width(budget: int, margin: int) -> int:
    """The width of vectors: half the groups of a row, and half of the tokens that can be listed.

    Where no token in a slot is among the best, as in an empty slot map, `n` maxima must reach the
    bound. Of g groups of random tokens -g log(1 - n/g) tokens then do: few enough where g > 1.75 n.
    """
    width = int(triton.next_power_of_2(max(budget, (budget + margin) * 7 // 8)))
    return min(max(512, width), MOST_SLOTS)


def _workspace_width(width: int) -> int:
    """The width in units of 8 bytes: two counters, a list of ranks, and one of 4-byte groups."""
    return 1 + 2 * width + width


def select_workspace(
    rows: int, layers: int, kv_heads: int, budget: int, margin: int, device: torch.device
) -> Tensor:
    """Make scratch for `rows` rows of any length.

    Each row, layer and kv head has two counters, a list of tokens and a list of groups. One launch
    after another may use it on one stream.

    Returns:
        (R * L * Hkv, width) int64.
    """
    width = _workspace_width(_default_width(budget, margin))
    return torch.empty((rows * layers * kv_heads, width), dtype=torch.int64, device=device)


def select_step(
    scores: Tensor,
    slot_map: Tensor,
    slots: Tensor,
    positions: Tensor,
    budgets: Tensor,
    first_layer: int,
    sink_tokens: int,
    recent_tokens: int,
    margin: int,
    workspace: Tensor,
    entering: Tensor,
    entering_slots: Tensor,
    counts: Tensor,
    width: int | None = None,
) -> None:
    """See the reference. One launch; rows of up to a million tokens.

    Overwrites the scores of tokens in slots. A NaN score whose 32 bits are all ones, which no
    arithmetic produces, does not compete.

    Args:
        width: the width of vectors, a power of two, at least k and half of k + margin. Only time
            depends on it.
    """
    rows, layers, kv_heads, row_capacity = scores.shape
    budget, capacity = slot_map.shape[-1], entering.shape[-1]
    units = rows * layers * kv_heads
    width = width or _default_width(budget, margin)
    warps = min(16, max(1, width // 128))
    into = (workspace, entering, entering_slots, counts)
    for tensor in (scores, slot_map, slots, positions, budgets, *into):
        assert tensor.is_contiguous()
    assert slot_map.shape[2] == kv_heads
    assert entering.shape == entering_slots.shape == (*scores.shape[:3], capacity)
    assert workspace.shape[0] >= units
    assert workspace.shape[1] >= _workspace_width(width)
    assert width >= budget
    assert budget + margin <= 2 * width <= 2 * MOST_SLOTS  # a count takes 16 bits
    assert row_capacity**2 < width << 33  # or the reciprocal of a group's size would not be exact
    if units == 0:
        return
    _select[(units,)](
        scores.view(torch.int32),
        slot_map,
        slots,
        positions,
        budgets,
        workspace,
        entering,
        entering_slots,
        counts,
        row_capacity,
        slot_map.shape[1],
        first_layer,
        sink_tokens,
        recent_tokens,
        workspace.shape[1],
        LAYERS=layers,
        KV_HEADS=kv_heads,
        BUDGET=budget,
        MARGIN=margin,
        CAPACITY=capacity,
        WIDTH=width,
        ENTERING=triton.next_power_of_2(capacity),
        num_warps=warps,
        # Two programs share the 64 K registers of a multiprocessor.
        maxnreg=min(255, max(32, 65536 // (32 * warps * 2) // 8 * 8)),
    )


@triton.jit
def _order_keys(bits):
    """Map the bits of float32 scores to int32 keys in the order of the scores."""
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(bits == LOWEST, 0, keys)  # -0.0 equals 0.0
    keys = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _FLOOR, keys)
    return tl.where(bits == _RESIDENT, LOWEST, keys)


@triton.jit
def _load_keys(scores, token, mask, start, stop):
    """Load the keys of tokens; those masked and those outside [start, stop) get `LOWEST`."""
    bits = tl.load(scores + token, mask=mask, other=_RESIDENT)
    return tl.where((token >= start) & (token < stop), _order_keys(bits), LOWEST)


@triton.jit
def _ranks(keys, token):
    """Unique int64 ranks by key, and then by token; see `rank_keys` of the reference."""
    return (keys.to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def _group_maxima(scores, start, stop, WIDTH: tl.constexpr):
    """Find the largest key of each group, (WIDTH,) twice; token t is in group t % (2 * WIDTH)."""
    lower = tl.full((WIDTH,), LOWEST, tl.int32)
    upper = tl.full((WIDTH,), LOWEST, tl.int32)
    for first in range(0, stop, 2 * WIDTH):
        token = first + tl.arange(0, WIDTH)
        lower = tl.maximum(lower, _load_keys(scores, token, token < stop, start, stop))
        token += WIDTH
        upper = tl.maximum(upper, _load_keys(scores, token, token < stop, start, stop))
    return lower, upper


@triton.jit
def _find_key_bound(maxima, slot_keys, highest, needed):
    """Find a key that at least `needed` tokens reach, and not many more."""
    lower, upper = maxima
    low = tl.full((), _FLOOR, tl.int32)
    high = highest + 1
    # The lowest group is a better first guess than the middle of all numbers.
    lowest = tl.minimum(
        tl.where(lower > LOWEST, lower, highest), tl.where(upper > LOWEST, upper, highest)
    )
    guess = tl.maximum(tl.min(lowest), low)
    found = (lower >= guess).to(tl.int32) + (upper >= guess).to(tl.int32)
    found = tl.sum(found + (slot_keys >= guess).to(tl.int32))
    low = tl.where(found >= needed, guess, low)
    high = tl.where(found >= needed, high, guess)
    return search((lower, upper, slot_keys), low, high, needed, needed + needed // 16)


@triton.jit
def _list_outsiders(scores, start, stop, maxima, bound, counters, entries, WIDTH: tl.constexpr):
    """Write the ranks at or above the bound, in any order, and return how many there are.

    Those beyond 2 * WIDTH are only counted. The groups that reach the bound are listed first,
    behind the list, so that only their tokens are looked at.
    """
    SIZE: tl.constexpr = 2 * WIDTH
    tl.store(counters + tl.arange(0, 2), tl.zeros((2,), tl.int32))
    tl.debug_barrier()
    key = (bound >> 32).to(tl.int32)
    groups = (entries + SIZE).to(tl.pointer_type(tl.int32))
    for half in tl.static_range(2):
        numbers = half * WIDTH + tl.arange(0, WIDTH)
        append(groups, counters, SIZE, numbers, maxima[half] >= key, WIDTH)
    tl.debug_barrier()
    # How many tokens a group has: never one, whose reciprocal would have 33 bits.
    rounds = tl.maximum(tl.cdiv(stop, SIZE), 2)
    reciprocal = ((1 << 32) // rounds.to(tl.int64) + 1).to(tl.uint32)
    looked_at = tl.load(counters, volatile=True) * rounds
    for first in range(0, looked_at, SIZE):
        index = first + tl.arange(0, SIZE)
        entry = tl.umulhi(index.to(tl.uint32), reciprocal).to(tl.int32)  # index // rounds
        group = tl.load(groups + entry, mask=index < looked_at, other=0)
        token = group + (index - entry * rounds) * SIZE
        keys = _load_keys(scores, token, (index < looked_at) & (token < stop), start, stop)
        ranks = _ranks(keys, token)
        append(entries, counters + 1, SIZE, ranks, ranks >= bound, SIZE)
    tl.debug_barrier()
    return tl.load(counters + 1, volatile=True)


@triton.jit
def _raise_bound(scores, start, stop, slot_ranks, low, high, fewest, WIDTH: tl.constexpr):
    """Find a bound that few enough tokens reach by reading the row again and again.

    This happens where very many tokens share a score, or the best share their groups.
    """
    while distance(low, high) > 1:
        first, second = thirds(low, high)
        reached = reaching(slot_ranks, first, second)
        for begin in range(0, stop, WIDTH):
            token = begin + tl.arange(0, WIDTH)
            keys = _load_keys(scores, token, token < stop, start, stop)
            reached += reaching(_ranks(keys, token), first, second)
        low, high = narrow(low, high, first, second, tl.sum(reached), fewest, 2 * WIDTH)
    return low


@triton.jit(
    do_not_specialize=[
        "row_capacity",
        "state_layers",
        "first_layer",
        "sink_tokens",
        "recent_tokens",
        "workspace_width",
    ],
    do_not_specialize_on_alignment=["slots", "positions", "budgets", "counts"],
)
def _select(
    scores,
    slot_map,
    slots,
    positions,
    budgets,
    workspace,
    entering,
    entering_slots,
    counts,
    row_capacity,
    state_layers,
    first_layer,
    sink_tokens,
    recent_tokens,
    workspace_width,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BUDGET: tl.constexpr,
    MARGIN: tl.constexpr,
    CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
    ENTERING: tl.constexpr,
):
    """One program selects the tokens of a unit, a row's kv head in one layer."""
    unit = tl.program_id(0).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    layer_head = unit % (LAYERS * KV_HEADS)
    state_slot = tl.load(slots + row).to(tl.int64)
    entering += unit * CAPACITY
    entering_slots += unit * CAPACITY
    enter_count = 0

    if state_slot >= 0:
        scores += unit * row_capacity
        slot_map += ((state_slot * state_layers + first_layer) * KV_HEADS + layer_head) * BUDGET
        scratch = workspace + unit * workspace_width
        counters = scratch.to(tl.pointer_type(tl.int32))
        entries = scratch + 1
        # The tokens that compete: [start, stop).
        start = sink_tokens
        stop = tl.load(positions + row) - recent_tokens + 1
        stop = tl.where(stop > start, stop, 0)
        candidates = tl.maximum(stop - start, 0)
        budget = tl.load(budgets + row)

        # The tokens in slots are taken out of the row.
        slot = tl.arange(0, WIDTH)  # [WIDTH], as all vectors below
        slot_tokens = tl.load(slot_map + slot, mask=slot < budget, other=-1)
        competes = (slot_tokens >= start) & (slot_tokens < stop)
        empties = tl.sum(((slot < budget) & (slot_tokens < 0)).to(tl.int32))
        slot_tokens = tl.where(competes, slot_tokens, 0)
        slot_keys = _load_keys(scores, slot_tokens, competes, start, stop)
        slot_keys = tl.where(competes, slot_keys, LOWEST)
        tl.debug_barrier()
        tl.store(scores + slot_tokens, tl.full((WIDTH,), _RESIDENT, tl.int32), mask=competes)
        tl.debug_barrier()

        # A bound that not many more tokens reach than the best `depth`, and a list of those.
        maxima = _group_maxima(scores, start, stop, WIDTH)
        highest = tl.max(tl.maximum(tl.maximum(maxima[0], maxima[1]), slot_keys))
        depth = tl.minimum(budget + MARGIN * budget // BUDGET, candidates)
        low = _find_key_bound(maxima, slot_keys, highest, depth)
        bound = low.to(tl.int64) << 32
        listed = _list_outsiders(scores, start, stop, maxima, bound, counters, entries, WIDTH)
        if listed > 2 * WIDTH:
            slot_ranks = _ranks(slot_keys, slot_tokens)
            high = (highest.to(tl.int64) + 1) << 32
            bound = _raise_bound(scores, start, stop, slot_ranks, bound, high, depth, WIDTH)
            low = (bound >> 32).to(tl.int32)
            listed = _list_outsiders(scores, start, stop, maxima, bound, counters, entries, WIDTH)
        lower = tl.load(entries + slot, mask=slot < listed, other=_LOWEST_RANK)
        key, token = (lower >> 32).to(tl.int32), lower.to(tl.int32)
        in_slots = (slot_keys, slot_tokens, empties, tl.minimum(budget, candidates))
        bounds = (low, highest, depth)
        out = (slot_map, entering, entering_slots, counts + row * 2)
        if listed > WIDTH:
            upper = tl.load(entries + WIDTH + slot, mask=WIDTH + slot < listed, other=_LOWEST_RANK)
            enter_count = exchange(
                (key, (upper >> 32).to(tl.int32)),
                (token, upper.to(tl.int32)),
                in_slots,
                bounds,
                counters,
                out,
                budget,
                CAPACITY,
                ENTERING,
            )
        else:  # as nearly always: counts are of fewer
            enter_count = exchange(
                (key,), (token,), in_slots, bounds, counters, out, budget, CAPACITY, ENTERING
            )

    # Padding behind the tokens that enter.
    pad = tl.arange(0, ENTERING)
    padded = (pad >= enter_count) & (pad < CAPACITY)
    nothing = tl.full((ENTERING,), -1, tl.int32)
    tl.store(entering + pad, nothing, mask=padded)
    tl.store(entering_slots + pad, nothing, mask=padded)
