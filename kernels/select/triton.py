"""Top-k with hysteresis, one program a (row, layer, kv head), Triton.

Sorting a row would be far too slow, so thresholds are found by search: count what lies at or above
three probes, keep a quarter of the interval. To count over the whole row each time would still be
too slow.
The row is therefore read once for the maxima of strided groups of tokens, which stay in registers.
If `n` group maxima lie at or above some key, so do the `n` best tokens: a bound that leaves few
more tokens than needed. They are listed in a second pass, which skips the groups below the bound,
and the exact thresholds are found on the list, which fits into registers too.

A working set hardly changes from step to step, so tokens in slots are taken out of the row first
and counted apart. The list then holds the few of the best that are in no slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOWEST = tl.constexpr(-(2**31))
"""Key of what does not compete."""
_FLOOR = tl.constexpr(-(2**31) + 1)
"""Key of a NaN, the lowest of a token that competes."""
_LOWEST_RANK = tl.constexpr(-(2**63))
_RESIDENT = tl.constexpr(-1)
"""Score bits of a token in a slot: a NaN that no arithmetic produces."""


def _default_groups(budget: int, margin: int) -> int:
    """How many groups the tokens of a row form, and how many of them can be listed.

    Where no token in a slot is among the best, as in an empty mirror, `n` maxima must reach the
    bound. Of g groups of random tokens -g log(1 - n/g) tokens then do: few enough where g > 1.75 n.
    """
    return max(1024, int(triton.next_power_of_2((budget + margin) * 7 // 4)))


def _workspace_width(groups: int) -> int:
    """In 8 bytes: two counters, a list of ranks and one of groups, which are 4 bytes each."""
    return 1 + groups + groups // 2


def select_workspace(
    rows: int, layers: int, kv_heads: int, budget: int, margin: int, device: torch.device
) -> Tensor:
    """Scratch for `rows` rows of any length.

    For each (row, layer, kv head), two counters, the list of its tokens and that of its groups.

    It may be used by one launch after another on one stream.

    Returns:
        (R * L * Hkv, width) int64.
    """
    width = _workspace_width(_default_groups(budget, margin))
    return torch.empty((rows * layers * kv_heads, width), dtype=torch.int64, device=device)


def _registers(warps: int, programs: int) -> int:
    """Of a thread, if so many programs are to share a multiprocessor's 64 K."""
    return min(255, max(32, 65536 // (32 * warps * programs) // 8 * 8))


def select_step(
    scores: Tensor,
    mirror: Tensor,
    slots: Tensor,
    positions: Tensor,
    first_layer: int,
    sink_tokens: int,
    recent_tokens: int,
    margin: int,
    workspace: Tensor,
    entering: Tensor,
    entering_slots: Tensor,
    counts: Tensor,
    groups: int | None = None,
    warps: int | None = None,
    resident_programs: int = 2,
    ahead: int = 1,
) -> None:
    """See the reference. One launch.

    Overwrites the scores of tokens in slots. A NaN score whose 32 bits are all ones, which no
    arithmetic produces, does not compete.

    Args:
        groups: how many groups the tokens of a row form, and tokens a list, a power of two, at
            least k + margin. Only time depends on it, and on what follows.
        warps: of one program.
        resident_programs: that a multiprocessor should have registers for.
    """
    rows, layers, kv_heads, row_capacity = scores.shape
    budget, capacity = mirror.shape[-1], entering.shape[-1]
    units = rows * layers * kv_heads
    groups = groups or _default_groups(budget, margin)
    warps = warps or min(16, max(1, groups // 256))
    for tensor in (scores, mirror, slots, positions, workspace, entering, entering_slots, counts):
        assert tensor.is_contiguous()
    assert mirror.shape[2] == kv_heads
    assert entering.shape == entering_slots.shape == (*scores.shape[:3], capacity)
    assert workspace.shape[0] >= units
    assert workspace.shape[1] >= _workspace_width(groups)
    assert groups >= budget + margin
    if units == 0:
        return
    _select[(units,)](
        scores.view(torch.int32),
        mirror,
        slots,
        positions,
        workspace,
        entering,
        entering_slots,
        counts,
        row_capacity,
        mirror.shape[1],
        first_layer,
        sink_tokens,
        recent_tokens,
        workspace.shape[1],
        LAYERS=layers,
        KV_HEADS=kv_heads,
        BUDGET=budget,
        MARGIN=margin,
        CAPACITY=capacity,
        GROUPS=groups,
        SLOTS=max(256, triton.next_power_of_2(budget)),
        ENTERING=triton.next_power_of_2(capacity),
        AHEAD=ahead,
        num_warps=warps,
        maxnreg=_registers(warps, resident_programs),
    )


@triton.jit
def _order_keys(bits):
    """int32 keys in the order of the float32 scores with these bits."""
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(bits == _LOWEST, 0, keys)  # -0.0 equals 0.0
    keys = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, _FLOOR, keys)
    return tl.where(bits == _RESIDENT, _LOWEST, keys)


@triton.jit
def _load_keys(scores, token, mask, start, stop):
    """Keys of the given tokens; `_LOWEST` for those masked and those outside [start, stop)."""
    bits = tl.load(scores + token, mask=mask, other=_RESIDENT)
    return tl.where((token >= start) & (token < stop), _order_keys(bits), _LOWEST)


@triton.jit
def _ranks(keys, token):
    """int64, unique: by key, then the newer token first. As `rank_keys` of the reference."""
    return (keys.to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit
def _middle(low, high):
    """Mean, rounded down, of integers whose sum might overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _quarters(low, high):
    """The numbers that cut an interval into four."""
    half = _middle(low, high)
    return _middle(low, half), half, _middle(half, high)


@triton.jit
def _reaching(numbers, low, high):
    """Which of the quarters each number reaches: three counters of 21 bits, to be summed."""
    first, second, third = _quarters(low, high)
    reached = (numbers >= first).to(tl.int64)
    reached += (numbers >= second).to(tl.int64) << 21
    return reached + ((numbers >= third).to(tl.int64) << 42)


@triton.jit
def _narrow(low, high, reached, fewest, most):
    """One step of a search for a bound that `fewest` to `most` numbers lie at or above.

    `reached` is the sum of `_reaching` over all numbers. Of the four quarters of the interval the
    one with the bound is left, or nothing beside the bound when a quarter's end is one.
    """
    first, second, third = _quarters(low, high)
    by_first = reached & 0x1FFFFF
    by_second = (reached >> 21) & 0x1FFFFF
    by_third = reached >> 42
    enough = tl.where(by_second >= fewest, by_second, by_first)
    found = tl.where(by_third >= fewest, by_third, enough)
    above = tl.where(by_third < fewest, third, high)
    above = tl.where(by_second < fewest, second, above)
    above = tl.where(by_first < fewest, first, above)
    low = tl.where(by_first >= fewest, first, low)
    low = tl.where(by_second >= fewest, second, low)
    low = tl.where(by_third >= fewest, third, low)
    return low, tl.where((found >= fewest) & (found <= most), low, above)


@triton.jit
def _group_maxima(scores, start, stop, GROUPS: tl.constexpr, AHEAD: tl.constexpr):
    """Largest key of each group; token t belongs to group t % GROUPS."""
    maxima = tl.full((GROUPS,), _LOWEST, tl.int32)
    for first in range(0, stop, GROUPS * AHEAD):
        for part in tl.static_range(AHEAD):
            token = first + part * GROUPS + tl.arange(0, GROUPS)
            maxima = tl.maximum(maxima, _load_keys(scores, token, token < stop, start, stop))
    return maxima


@triton.jit
def _find_key_bound(maxima, slot_keys, highest, needed):
    """A key that at least `needed` tokens reach, and not many more."""
    low = tl.full((), _FLOOR, tl.int32)
    high = highest + 1
    # The lowest group is a better first guess than the middle of all numbers.
    guess = tl.maximum(tl.min(tl.where(maxima > _LOWEST, maxima, highest)), low)
    found = tl.sum((maxima >= guess).to(tl.int32)) + tl.sum((slot_keys >= guess).to(tl.int32))
    low = tl.where(found >= needed, guess, low)
    high = tl.where(found >= needed, high, guess)
    while _middle(low, high) > low:
        reached = tl.sum(_reaching(maxima, low, high)) + tl.sum(_reaching(slot_keys, low, high))
        low, high = _narrow(low, high, reached, needed, needed + needed // 16)
    return low


@triton.jit
def _append(entries, counter, capacity, values, mask, SIZE: tl.constexpr):
    """Append the masked values to a list, in any order; beyond its capacity they only count."""
    one = tl.full((SIZE,), 1, tl.int32)
    index = tl.atomic_add(counter + tl.zeros((SIZE,), tl.int32), one, mask, sem="relaxed")
    tl.store(entries + index, values, mask=mask & (index < capacity))


@triton.jit
def _list_outsiders(scores, start, stop, maxima, bound, counters, entries, GROUPS: tl.constexpr):
    """Write the ranks at or above the bound, in any order; returns how many there are.

    Those beyond GROUPS are only counted. The groups that pass are listed first, behind the list, so
    that only their tokens are looked at.
    """
    tl.store(counters + tl.arange(0, 2), tl.zeros((2,), tl.int32))
    tl.debug_barrier()
    passes = maxima >= (bound >> 32).to(tl.int32)
    groups = (entries + GROUPS).to(tl.pointer_type(tl.int32))
    _append(groups, counters, GROUPS, tl.arange(0, GROUPS), passes, GROUPS)
    tl.debug_barrier()
    rounds = tl.cdiv(stop, GROUPS)
    looked_at = tl.load(counters, volatile=True) * rounds
    for first in range(0, looked_at, GROUPS):
        index = first + tl.arange(0, GROUPS)
        group = tl.load(groups + index // rounds, mask=index < looked_at, other=0)
        token = group + index % rounds * GROUPS
        keys = _load_keys(scores, token, (index < looked_at) & (token < stop), start, stop)
        ranks = _ranks(keys, token)
        _append(entries, counters + 1, GROUPS, ranks, ranks >= bound, GROUPS)
    tl.debug_barrier()
    return tl.load(counters + 1, volatile=True)


@triton.jit
def _raise_bound(scores, start, stop, slot_ranks, low, high, fewest, most, GROUPS: tl.constexpr):
    """Find a bound that few enough reach by reading the row again and again.

    This happens where a mass of tokens share a score or the best share their groups.
    """
    while _middle(low, high) > low:
        reached = tl.zeros((GROUPS,), tl.int64)
        for first in range(0, stop, GROUPS):
            token = first + tl.arange(0, GROUPS)
            keys = _load_keys(scores, token, token < stop, start, stop)
            reached += _reaching(_ranks(keys, token), low, high)
        found = tl.sum(reached) + tl.sum(_reaching(slot_ranks, low, high))
        low, high = _narrow(low, high, found, fewest, most)
    return low


@triton.jit
def _find_rank(ranks, low, high, count, slot_ranks=None):
    """A rank that exactly `count` of the given ones reach."""
    while _middle(low, high) > low:
        reached = tl.sum(_reaching(ranks, low, high))
        if slot_ranks is not None:
            reached += tl.sum(_reaching(slot_ranks, low, high))
        low, high = _narrow(low, high, reached, count, count)
    return low


@triton.jit
def _write_entering(enters, ranks, entering, count, ENTERING: tl.constexpr):
    """Write the tokens that enter, `count` of the listed ones, in token order."""
    order = tl.cumsum(enters.to(tl.int32)) - 1
    tl.store(entering + order, (ranks & 0x7FFFFFFF).to(tl.int32), mask=enters)
    tl.debug_barrier()
    place = tl.arange(0, ENTERING)
    used = place < count
    token = tl.load(entering + place, mask=used, other=0)
    order = tl.zeros((ENTERING,), tl.int32)
    for first in range(0, count, 16):
        other = first + tl.arange(0, 16)
        others = tl.load(entering + other, mask=other < count, other=0x7FFFFFFF)
        order += tl.sum((others[None, :] < token[:, None]).to(tl.int32), axis=1)
    tl.debug_barrier()
    tl.store(entering + order, token, mask=used)


@triton.jit
def _fill_slots(mirror, stays, entering, entering_slots, count, BUDGET: tl.constexpr, slot):
    """Put the entering tokens into empty slots, then into those whose token does not stay."""
    inside = slot < BUDGET
    token = tl.load(mirror + slot, mask=inside, other=0)
    empty = (inside & (token < 0)).to(tl.int32)
    left = (inside & (token >= 0) & (stays == 0)).to(tl.int32)
    order = tl.where(empty > 0, tl.cumsum(empty), tl.sum(empty) + tl.cumsum(left)) - 1
    takes = (empty + left > 0) & (order < count)
    tl.store(mirror + slot, tl.load(entering + order, mask=takes), mask=takes)
    tl.store(entering_slots + order, slot, mask=takes)


@triton.jit(
    do_not_specialize=[
        "row_capacity",
        "state_layers",
        "first_layer",
        "sink_tokens",
        "recent_tokens",
        "workspace_width",
    ]
)
def _select(
    scores,
    mirror,
    slots,
    positions,
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
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    ENTERING: tl.constexpr,
    AHEAD: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    layer_head = unit % (LAYERS * KV_HEADS)
    state_slot = tl.load(slots + row).to(tl.int64)
    entering += unit * CAPACITY
    entering_slots += unit * CAPACITY
    enter_count = 0

    if state_slot >= 0:
        scores += unit * row_capacity
        mirror += ((state_slot * state_layers + first_layer) * KV_HEADS + layer_head) * BUDGET
        scratch = workspace + unit * workspace_width
        counters = scratch.to(tl.pointer_type(tl.int32))
        entries = scratch + 1
        start = sink_tokens
        stop = tl.load(positions + row) - recent_tokens + 1
        stop = tl.where(stop > start, stop, 0)
        candidates = tl.maximum(stop - start, 0)

        slot = tl.arange(0, SLOTS)
        token = tl.load(mirror + slot, mask=slot < BUDGET, other=-1)
        competes = (token >= start) & (token < stop)
        token = tl.where(competes, token, 0)
        slot_keys = tl.where(competes, _load_keys(scores, token, competes, start, stop), _LOWEST)
        slot_ranks = _ranks(slot_keys, token)
        tl.debug_barrier()
        tl.store(scores + token, tl.full((SLOTS,), _RESIDENT, tl.int32), mask=competes)
        tl.debug_barrier()

        maxima = _group_maxima(scores, start, stop, GROUPS, AHEAD)
        highest = tl.maximum(tl.max(maxima), tl.max(slot_keys))
        depth = tl.minimum(BUDGET + MARGIN, candidates)
        bound = _find_key_bound(maxima, slot_keys, highest, depth).to(tl.int64) << 32
        above_all = (highest.to(tl.int64) + 1) << 32
        listed = _list_outsiders(scores, start, stop, maxima, bound, counters, entries, GROUPS)
        if listed > GROUPS:
            bound = _raise_bound(
                scores, start, stop, slot_ranks, bound, above_all, depth, GROUPS, GROUPS
            )
            listed = _list_outsiders(scores, start, stop, maxima, bound, counters, entries, GROUPS)
        index = tl.arange(0, GROUPS)
        ranks = tl.load(entries + index, mask=index < listed, other=_LOWEST_RANK)

        stay_rank = _find_rank(ranks, bound, above_all, depth, slot_ranks)
        stays = (slot_ranks >= stay_rank).to(tl.int32)
        wanted = tl.minimum(BUDGET, candidates) - tl.sum(stays)
        enter_count = tl.minimum(wanted, CAPACITY)
        if enter_count > 0:
            # Who enters is among the best `depth`.
            enter_rank = _find_rank(ranks, stay_rank, above_all, enter_count)
            _write_entering(ranks >= enter_rank, ranks, entering, enter_count, ENTERING)
            tl.debug_barrier()
            _fill_slots(mirror, stays, entering, entering_slots, enter_count, BUDGET, slot)
            tl.atomic_add(counts + row * 2, enter_count)
            if wanted > CAPACITY:
                tl.atomic_add(counts + row * 2 + 1, wanted - CAPACITY)

    pad = tl.arange(0, ENTERING)
    padded = (pad >= enter_count) & (pad < CAPACITY)
    nothing = tl.full((ENTERING,), -1, tl.int32)
    tl.store(entering + pad, nothing, mask=padded)
    tl.store(entering_slots + pad, nothing, mask=padded)
