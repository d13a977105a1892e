"""The tokens of a working set are selected, Triton.

Sorting a row would be far too slow, so thresholds are found by search: count how many keys are at
or above two probes, and keep a third of the interval. To count over the whole row each time would
still be too slow. A first launch therefore reads the row once for the maxima of small groups of
tokens, which the second keeps in registers. If `n` group maxima are at or above some key, so are
the `n` best tokens: a bound that leaves few more tokens than needed. They are listed, of the groups
that reach the bound, and the exact thresholds are found on the list, which fits into registers too.

Many programs of the first launch share a row: one alone asks memory for too little at a time. One
program of the second has a whole row, because each count needs all of its numbers.

A working set hardly changes from step to step, so tokens in slots are taken out of the row first
and counted apart. The list then holds those of the best that are in no slot, which are few.

Counting is bound by instructions. So all that is in registers is in vectors of one width, which
makes a count one sum; and it is 32-bit keys, with the tokens, which decide ties, beside them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_rank.kernels.dependent import (
    dependent_launch,
    has_dependents,
    wait_for_kernel_ahead,
)
from cache_rank.kernels.select.exchanging import exchange, write_chosen
from cache_rank.kernels.select.maxima import (
    VARYING,
    competing,
    find_maxima,
    group_sizes,
    scratch,
)
from cache_rank.kernels.select.reference import MOST_SLOTS
from cache_rank.kernels.select.search import (
    FLOOR,
    LOWEST,
    find_key_bound,
    load_keys,
    make_ranks,
    raise_bound,
)


class Launch(NamedTuple):
    """How the work is laid out; only time depends on it."""

    groups: int = 256
    """Groups whose maxima a program of the first launch finds."""

    rounds: int = 16
    """Tokens of each of them that it reads at a time."""

    numbers: int = 4
    """Numbers of a vector that a thread of the second launch has."""

    visited: int = 8
    """Tokens that such a thread reads at a time, of a group that reaches the bound."""

    registers: int = 64
    """Registers that such a thread has at most, or twice as many if it has more numbers."""


LAUNCH = Launch()

_MAXIMA_WARPS = 4

_LOWEST_RANK = tl.constexpr(-(2**63))
"""The rank of a token that does not compete."""


def _default_width(budget: int, margin: int) -> int:
    """The width of vectors: half the groups of a row, and half of the tokens that can be listed.

    Where no token in a slot is among the best, as in an empty slot map, `n` maxima must reach the
    bound. Of g groups of random tokens -g log(1 - n/g) tokens then do: few enough where g > 1.75 n.
    """
    width = int(triton.next_power_of_2(max(budget, (budget + margin) * 7 // 8)))
    return min(max(512, width), MOST_SLOTS)


def _workspace_width(width: int) -> int:
    """The width in units of 8 bytes; see `scratch`."""
    return 2 * width + (2 + 2 + 1) * width // 2


def select_workspace(
    rows: int, layers: int, kv_heads: int, budget: int, margin: int, device: torch.device
) -> Tensor:
    """Make scratch for `rows` rows of any length.

    One launch after another may use it on one stream.

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
    """See the reference. Two launches; rows of up to a million tokens.

    Overwrites the scores of tokens in slots. A NaN score whose 32 bits are all ones, which no
    arithmetic produces, does not compete.

    Args:
        width: the width of vectors, a power of two, at least k and half of k + margin. Only time
            depends on it.
    """
    rows, layers, kv_heads, row_capacity = scores.shape
    budget, capacity = slot_map.shape[-1], entering.shape[-1]
    units = rows * layers * kv_heads
    launch, width = LAUNCH, width or _default_width(budget, margin)
    groups = min(launch.groups, 2 * width)
    parts = 2 * width // groups
    into = (workspace, entering, entering_slots, counts)
    for tensor in (scores, slot_map, slots, positions, budgets, *into):
        assert tensor.is_contiguous()
    assert slot_map.shape[2] == kv_heads
    assert entering.shape == entering_slots.shape == (*scores.shape[:3], capacity)
    assert workspace.shape[0] >= units
    assert workspace.shape[1] >= _workspace_width(width)
    assert width >= budget
    assert budget + margin <= 2 * width <= 2 * MOST_SLOTS  # a count takes 16 bits
    if units == 0:
        return
    of_row = (
        scores.view(torch.int32),
        slot_map,
        slots,
        positions,
        budgets,
        workspace,
        row_capacity,
        slot_map.shape[1],
        first_layer,
        sink_tokens,
        recent_tokens,
        workspace.shape[1],
    )
    constants = {
        "LAYERS": layers,
        "KV_HEADS": kv_heads,
        "BUDGET": budget,
        "WIDTH": width,
        "GROUPS": groups,
    }
    find_maxima[(units, parts)](
        *of_row,
        **constants,
        ROUNDS=launch.rounds,
        HAS_DEPENDENTS=has_dependents(scores),
        num_warps=_MAXIMA_WARPS,
    )
    warps = min(16, max(1, width // (32 * launch.numbers)))
    _select[(units,)](
        *of_row,
        entering,
        entering_slots,
        counts,
        **constants,
        MARGIN=margin,
        CAPACITY=capacity,
        ENTERING=triton.next_power_of_2(capacity),
        VISITED=32 * warps,
        AT_ONCE=launch.visited,
        num_warps=warps,
        maxnreg=launch.registers * (1 if width <= 32 * launch.numbers * warps else 2),
        **dependent_launch(scores),
    )


@triton.jit
def _list_outsiders(
    scores,
    candidates,
    maxima,
    bound,
    lists,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    VISITED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Write the ranks at or above the bound, in any order, and return how many there are.

    Those beyond 2 * WIDTH are only counted. The groups that reach the bound are listed first, so
    that only their tokens are looked at. A thread has a group, AT_ONCE of its tokens at a time.
    """
    start, stop = candidates
    entries, groups = lists
    least = (bound >> 32).to(tl.int32)
    least = tl.where(least == FLOOR, LOWEST, least)  # a group of NaNs alone has no maximum
    number = tl.arange(0, WIDTH)
    reach = (maxima[0] >= least, maxima[1] >= least)
    count = write_chosen(groups, (number, WIDTH + number), reach)
    tl.debug_barrier()
    span, rounds = group_sizes(stop, WIDTH, GROUPS)
    listed = tl.zeros((), tl.int32)
    for first in range(0, count, VISITED):
        index = first + tl.arange(0, VISITED)
        group = tl.load(groups + index, mask=index < count, other=0)
        begin = group // GROUPS * span
        end = tl.where(index < count, tl.minimum(begin + span, stop), 0)
        begin += group % GROUPS
        for before in range(0, rounds, AT_ONCE):
            ranks = ()
            for ahead in tl.static_range(AT_ONCE):
                token = begin + (before + ahead) * GROUPS
                keys = load_keys(scores, token, (token >= start) & (token < end))
                ranks = ranks + (make_ranks(keys, token),)  # type: ignore[assignment]  # noqa: RUF005
            found = tl.zeros((VISITED,), tl.int32)
            for ahead in tl.static_range(AT_ONCE):
                found += (ranks[ahead] >= bound).to(tl.int32)
            place = listed + tl.cumsum(found) - found
            for ahead in tl.static_range(AT_ONCE):
                reaches = ranks[ahead] >= bound
                tl.store(entries + place, ranks[ahead], mask=reaches & (place < 2 * WIDTH))
                place += reaches.to(tl.int32)
            listed += tl.sum(found)
    tl.debug_barrier()
    return listed


@triton.jit(
    do_not_specialize=VARYING,
    do_not_specialize_on_alignment=["slots", "positions", "budgets", "counts"],
)
def _select(
    scores,
    slot_map,
    slots,
    positions,
    budgets,
    workspace,
    row_capacity,
    state_layers,
    first_layer,
    sink_tokens,
    recent_tokens,
    workspace_width,
    entering,
    entering_slots,
    counts,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BUDGET: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    MARGIN: tl.constexpr,
    CAPACITY: tl.constexpr,
    ENTERING: tl.constexpr,
    VISITED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program selects the tokens of a unit, a row's kv head in one layer."""
    unit = tl.program_id(0).to(tl.int64)
    row = unit // (LAYERS * KV_HEADS)
    state_slot = tl.load(slots + row).to(tl.int64)
    entering += unit * CAPACITY
    entering_slots += unit * CAPACITY
    enter_count = 0
    start, stop = competing(tl.load(positions + row), sink_tokens, recent_tokens)
    budget = tl.load(budgets + row)
    wait_for_kernel_ahead(DEPENDENT)

    if state_slot >= 0:
        scores += unit * row_capacity
        layer_head = first_layer * KV_HEADS + unit % (LAYERS * KV_HEADS)
        slot_map += (state_slot * state_layers * KV_HEADS + layer_head) * BUDGET
        entries, groups, of_groups, of_slots = scratch(workspace, unit, workspace_width, WIDTH)
        candidates = tl.maximum(stop - start, 0)

        slot = tl.arange(0, WIDTH)  # [WIDTH], as all vectors below
        maxima = tl.load(of_groups + slot), tl.load(of_groups + WIDTH + slot)
        slot_tokens = tl.load(slot_map + slot, mask=slot < budget, other=-1)
        competes = (slot_tokens >= start) & (slot_tokens < stop)
        empties = tl.sum(((slot < budget) & (slot_tokens < 0)).to(tl.int32))
        slot_tokens = tl.where(competes, slot_tokens, 0)
        slot_keys = tl.where(competes, tl.load(of_slots + slot), LOWEST)

        # A bound that not many more tokens reach than the best `depth`, and a list of those.
        highest = tl.max(tl.maximum(tl.maximum(maxima[0], maxima[1]), slot_keys))
        highest = tl.maximum(highest, FLOOR)
        depth = tl.minimum(budget + MARGIN * budget // BUDGET, candidates)
        low = find_key_bound(maxima, slot_keys, highest, depth)
        bound = low.to(tl.int64) << 32
        lists = entries, groups
        listed = _list_outsiders(
            scores, (start, stop), maxima, bound, lists, WIDTH, GROUPS, VISITED, AT_ONCE
        )
        if listed > 2 * WIDTH:
            slot_ranks = make_ranks(slot_keys, slot_tokens)
            high = (highest.to(tl.int64) + 1) << 32
            bound = raise_bound(scores, start, stop, slot_ranks, bound, high, depth, WIDTH)
            low = (bound >> 32).to(tl.int32)
            listed = _list_outsiders(
                scores, (start, stop), maxima, bound, lists, WIDTH, GROUPS, VISITED, AT_ONCE
            )
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
                out,
                budget,
                CAPACITY,
                ENTERING,
            )
        else:  # as nearly always: counts are of fewer
            enter_count = exchange(
                (key,), (token,), in_slots, bounds, out, budget, CAPACITY, ENTERING
            )

    # Padding behind the tokens that enter.
    pad = tl.arange(0, ENTERING)
    padded = (pad >= enter_count) & (pad < CAPACITY)
    nothing = tl.full((ENTERING,), -1, tl.int32)
    tl.store(entering + pad, nothing, mask=padded)
    tl.store(entering_slots + pad, nothing, mask=padded)
