"""The largest keys of groups of tokens are found, and tokens in slots are set apart, Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from cache_rank.kernels.dependent import let_dependents_start
from cache_rank.kernels.select.search import LOWEST, RESIDENT, order_keys

VARYING = [
    "row_capacity",
    "state_layers",
    "first_layer",
    "sink_tokens",
    "recent_tokens",
    "workspace_width",
]
"""Arguments whose values are not compiled for."""

_ALIGNED = tl.constexpr(32)
"""The tokens of a program of the first launch are a multiple of this."""


@triton.jit
def scratch(workspace, unit, workspace_width, WIDTH: tl.constexpr):
    """The scratch of a unit: a list of ranks, one of groups, all maxima, and the keys of slots."""
    entries = workspace + unit * workspace_width
    groups = (entries + 2 * WIDTH).to(tl.pointer_type(tl.int32))
    return entries, groups, groups + 2 * WIDTH, groups + 4 * WIDTH


@triton.jit
def competing(position, sink_tokens, recent_tokens):
    """The tokens that compete: [start, stop)."""
    stop = position - recent_tokens + 1
    return sink_tokens, tl.where(stop > sink_tokens, stop, 0)


@triton.jit
def group_sizes(stop, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """How many tokens each program of the first launch reads, and how many a group has at most.

    The tokens of a program follow one another. Every GROUPS-th of them is in the same group,
    because neighbours often score alike.
    """
    PARTS: tl.constexpr = 2 * WIDTH // GROUPS
    span = tl.cdiv(stop, PARTS * _ALIGNED) * _ALIGNED
    return span, tl.cdiv(span, GROUPS)


@triton.jit(
    do_not_specialize=VARYING,
    do_not_specialize_on_alignment=["slots", "positions", "budgets"],
)
def find_maxima(
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
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BUDGET: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    ROUNDS: tl.constexpr,
    HAS_DEPENDENTS: tl.constexpr,
):
    """One program finds the largest keys of GROUPS groups of a unit, but for tokens in slots.

    Of these the keys are kept, and then their scores are overwritten.
    """
    let_dependents_start(HAS_DEPENDENTS)
    SLOTS: tl.constexpr = min(WIDTH, 1024)  # at a time
    unit, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = unit // (LAYERS * KV_HEADS)
    state_slot = tl.load(slots + row).to(tl.int64)
    if state_slot >= 0:
        start, stop = competing(tl.load(positions + row), sink_tokens, recent_tokens)
        span, _ = group_sizes(stop, WIDTH, GROUPS)
        first = part * span
        end = tl.minimum(first + span, stop)
        start = tl.maximum(first, start)
        scores += unit * row_capacity
        _, _, maxima, slot_keys = scratch(workspace, unit, workspace_width, WIDTH)

        layer_head = first_layer * KV_HEADS + unit % (LAYERS * KV_HEADS)
        slot_map += (state_slot * state_layers * KV_HEADS + layer_head) * BUDGET
        budget = tl.load(budgets + row)
        for first_slot in range(0, budget, SLOTS):
            slot = first_slot + tl.arange(0, SLOTS)
            resident = tl.load(slot_map + slot, mask=slot < budget, other=-1)
            is_here = (resident >= start) & (resident < end)
            bits = tl.load(scores + resident, mask=is_here)
            tl.store(slot_keys + slot, order_keys(bits), mask=is_here)
            tl.debug_barrier()
            tl.store(scores + resident, tl.full((SLOTS,), RESIDENT, tl.int32), mask=is_here)
        tl.debug_barrier()

        # A maximum ignores NaNs, unless there is nothing else.
        group = tl.arange(0, GROUPS)
        further = tl.arange(0, ROUNDS)[:, None] * GROUPS
        candidates = tl.maximum(end - start, 0).to(tl.uint32)
        best = tl.full((GROUPS,), float("nan"), tl.float32)
        for token in range(first, end, ROUNDS * GROUPS):
            # Below `start` the difference is negative, a high number without sign.
            inside = ((token - start + group)[None, :] + further).to(tl.uint32) < candidates
            tile = tl.load((scores + token + group)[None, :] + further, inside, RESIDENT)
            best = tl.maximum(best, tl.max(tile.to(tl.float32, bitcast=True), axis=0))
        keys = tl.where(best == best, order_keys(best.to(tl.int32, bitcast=True)), LOWEST)
        tl.store(maxima + part * GROUPS + group, keys)
