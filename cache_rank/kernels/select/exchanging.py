"""Which tokens stay in their slots and which enter, of those that are listed, Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from cache_rank.kernels.select.search import LOWEST, find_rank, reaches


@triton.jit
def write_chosen(entries, values, chosen):
    """Write the chosen values of one or two vectors one behind another; return how many."""
    counts = chosen[0].to(tl.int32)
    if len(chosen) == 2:
        counts += chosen[1].to(tl.int32) << 16  # two sums in one
    before, count = tl.cumsum(counts), tl.sum(counts)
    tl.store(entries + (before & 0xFFFF) - 1, values[0], mask=chosen[0])
    if len(chosen) == 2:
        behind = entries + (count & 0xFFFF)
        tl.store(behind + (before >> 16) - 1, values[1], mask=chosen[1])
    return (count & 0xFFFF) + (count >> 16)


@triton.jit
def _write_entering(keys, tokens, key, token, entering, count, ENTERING: tl.constexpr):
    """Write the `count` tokens whose ranks reach the given one, in the order of tokens."""
    enter = (reaches(keys[0], tokens[0], key, token),)
    if len(keys) == 2:
        more = (reaches(keys[1], tokens[1], key, token),)
        enter = enter + more  # type: ignore[assignment]
    write_chosen(entering, tokens, enter)
    tl.debug_barrier()
    # Sorted: a token's place is how many others are smaller.
    OTHERS: tl.constexpr = min(ENTERING, 16)
    place = tl.arange(0, ENTERING)
    used = place < count
    found = tl.load(entering + place, mask=used, other=0)
    smaller = tl.zeros((OTHERS, ENTERING), tl.int32)
    for first in range(0, count, OTHERS):
        other = first + tl.arange(0, OTHERS)
        others = tl.load(entering + other, mask=other < count, other=0x7FFFFFFF)
        smaller += (others[:, None] < found[None, :]).to(tl.int32)
    order = tl.sum(smaller, axis=0)
    tl.debug_barrier()
    tl.store(entering + order, found, mask=used)


@triton.jit
def _spare_highest(stays, keys, tokens, highest, count):
    """Let the `count` best of the tokens in slots that do not stay, none above `highest`, stay too.

    Those that do not compete are not spared, even if that leaves fewer.
    """
    left = tl.where(stays > 0, LOWEST, keys)
    competes = left > LOWEST
    count = tl.minimum(count, tl.sum(competes.to(tl.int32)))
    if count > 0:
        lowest = tl.min(tl.where(competes, left, highest))
        key, token = find_rank((left,), (tokens,), lowest, highest + 1, count)
        stays += reaches(left, tokens, key, token).to(tl.int32)
    return stays


@triton.jit
def _fill_slots(slot_map, stays, entering, entering_slots, empties, count, budget):
    """Put the entering tokens into empty slots, and then into those whose token does not stay.

    Where those are more, the first are taken. `empties` is how many slots are empty.
    """
    slot = tl.arange(0, stays.shape[0])
    inside = slot < budget
    token = tl.load(slot_map + slot, mask=inside, other=0)
    empty = (inside & (token < 0)).to(tl.int32)
    left = (inside & (token >= 0) & (stays == 0)).to(tl.int32)
    before = tl.cumsum(empty + (left << 16))  # two sums in one
    order = tl.where(empty > 0, before & 0xFFFF, empties + (before >> 16)) - 1
    takes = (empty + left > 0) & (order < count)
    tl.store(slot_map + slot, tl.load(entering + order, mask=takes), mask=takes)
    tl.store(entering_slots + order, slot, mask=takes)


@triton.jit
def exchange(
    keys,
    tokens,
    in_slots,
    bounds,
    out,
    budget,
    CAPACITY: tl.constexpr,
    ENTERING: tl.constexpr,
):
    """Let the best tokens stay in their slots, and others of the best enter; return how many.

    Args:
        keys, tokens: vectors of the tokens that are listed.
        in_slots: keys and tokens of those in slots; how many slots are empty, and how many tokens
            are to be in slots.
        bounds: a key that `depth` keys reach, the highest of all, and `depth`: so many of the best
            stay, if they are in slots.
        out: the unit's slot map, entering tokens and their slots, and its row's counts.
        budget: how many slots the row has.
    """
    slot_keys, slot_tokens, empties, wished = in_slots
    low, highest, depth = bounds
    slot_map, entering, entering_slots, counts = out
    # The exact rank of the best `depth`: which tokens stay in their slots.
    every_key, every_token = (slot_keys,) + keys, (slot_tokens,) + tokens  # noqa: RUF005
    key, token = find_rank(every_key, every_token, low, highest + 1, depth)
    stays = reaches(slot_keys, slot_tokens, key, token).to(tl.int32)
    staying = tl.sum(stays)
    wanted = wished - staying
    enter_count = tl.minimum(wanted, CAPACITY)
    if enter_count > 0:
        if wanted > CAPACITY:
            # Of the tokens that fell out as many stay as do not have to leave.
            leaving = tl.maximum(enter_count - empties, 0)
            spared = budget - empties - staying - leaving
            stays = _spare_highest(stays, slot_keys, slot_tokens, key, spared)
        # Those that enter are among the best `depth`, and so in the list.
        key, token = find_rank(keys, tokens, key, highest + 1, enter_count)
        _write_entering(keys, tokens, key, token, entering, enter_count, ENTERING)
        tl.debug_barrier()
        _fill_slots(slot_map, stays, entering, entering_slots, empties, enter_count, budget)
        tl.atomic_add(counts, enter_count)
        if wanted > CAPACITY:
            tl.atomic_add(counts + 1, wanted - CAPACITY)
    return enter_count
