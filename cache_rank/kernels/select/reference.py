"""The tokens of a working set are selected, plain torch: the specification.

AsyncSpade (arXiv 2510.07486), section 4.3, selects the k tokens with the best scores. Here they are
in slots, and the slot map says which token is in which. A token in a slot stays while it is among
the best k + margin, so that the answer to a step is a small difference against the slot map. Where
more should be exchanged than an answer has room for, the best enter and the lowest leave.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_SLOTS = 1 << 14
"""The Triton kernel takes no larger k; k + margin may be twice as much."""

EMPTY = -1
"""This stands in the slot map for an empty slot, and pads lists of tokens and slots."""

_LOWEST = torch.iinfo(torch.int64).min
_HIGHEST = torch.iinfo(torch.int64).max


class Selection(NamedTuple):
    """What changes in the slots of each layer and kv head.

    Attributes:
        slot_map: (L, Hkv, k) int32, the token position in each slot after the change; -1 is empty.
        entering: (L, Hkv, C) int32, positions of the tokens that enter, ascending; -1 pads.
        slots: (L, Hkv, C) int32, the slot that each entering token takes; -1 pads.
        overflow: (L, Hkv) int32, how many more tokens would have entered at unlimited capacity.
    """

    slot_map: Tensor
    entering: Tensor
    slots: Tensor
    overflow: Tensor


def rank_keys(scores: Tensor, candidates: range) -> Tensor:
    """Map scores to int64 keys in the order of (score, position), which are unique.

    Args:
        scores: (..., T) float32. A NaN ranks last.
        candidates: the positions that compete; others get the lowest key.

    Returns:
        (..., T) int64.
    """
    # Adding zero turns -0.0 into 0.0, which would otherwise order differently.
    bits = (scores + 0.0).contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = ordered.masked_fill(scores.isnan(), torch.iinfo(torch.int32).min + 1)
    position = torch.arange(scores.shape[-1], device=scores.device)
    keys = (ordered.to(torch.int64) << 32) | position
    competes = (position >= candidates.start) & (position < candidates.stop)
    return torch.where(competes, keys, _LOWEST)


def top_tokens(scores: Tensor, candidates: range, count: int) -> Tensor:
    """List the positions of the `count` best candidates, best first; ties go to the newer token.

    Returns:
        (..., min(count, len(candidates))) int64.
    """
    keys = rank_keys(scores, candidates)
    return keys.topk(min(count, len(candidates)), dim=-1).indices


def select_tokens(
    scores: Tensor, slot_map: Tensor, candidates: range, margin: int, capacity: int
) -> Selection:
    """Select the tokens of one sequence's next step, and how its slots change.

    The target is the k best candidates. A token in a slot stays unless it falls out of the best
    k + margin. The best tokens that are in no slot enter, at most `capacity` of them. In the order
    of their positions they take the empty slots, and then those of the tokens that fell out, both
    in ascending order. Where more fell out than enter, the lowest of them leave: tokens that do not
    compete, and then those with the lowest scores. The others keep their slots.

    Args:
        scores: (L, Hkv, T) float32.
        slot_map: (L, Hkv, k) int32 positions, -1 where empty.
        candidates: the positions that compete, within [0, T).
        margin: how far beyond k a token may fall before it leaves.
        capacity: C in the shapes, the most tokens that may enter a layer and kv head.

    Returns:
        The change. The given slot map is not modified.
    """
    budget, tokens = slot_map.shape[-1], scores.shape[-1]
    target = min(budget, len(candidates))
    most = min(capacity, target)
    keys = rank_keys(scores, candidates)

    competes = (slot_map >= candidates.start) & (slot_map < candidates.stop)
    slot_keys = keys.gather(-1, torch.where(competes, slot_map, 0).to(torch.int64))
    stays = torch.zeros_like(competes)
    if len(candidates):
        depth = min(budget + margin, len(candidates))
        stays = competes & (slot_keys >= keys.topk(depth, dim=-1).values[..., -1:])
    wanted = target - stays.sum(-1)  # (L, Hkv)

    resident = torch.zeros((*keys.shape[:-1], tokens + 1), dtype=torch.bool, device=keys.device)
    resident.scatter_(-1, torch.where(competes, slot_map, tokens).to(torch.int64), True)
    best = keys.masked_fill(resident[..., :-1], _LOWEST).topk(most, dim=-1).indices
    used = torch.arange(most, device=keys.device) < wanted.unsqueeze(-1)
    # Unused entries, which `tokens` stands for, sort last.
    entering = torch.where(used, best, tokens).sort(-1).values.to(torch.int32)
    entering = torch.where(used, entering, EMPTY)

    empty = slot_map == EMPTY
    by_rank = torch.where(stays, _HIGHEST, torch.where(competes, slot_keys, _LOWEST))
    by_rank = by_rank.masked_fill(empty, _HIGHEST).argsort(dim=-1, stable=True)
    ranking = torch.arange(budget, device=keys.device)
    leaving = (wanted.clamp(max=most) - empty.sum(-1)).unsqueeze(-1)
    leaves = torch.zeros_like(competes).scatter_(-1, by_rank, ranking < leaving)
    slot_order = torch.where(empty, 0, torch.where(leaves, 1, 2))
    taken = slot_order.argsort(dim=-1, stable=True)[..., :most]
    after = slot_map.clone()
    # Unused entries write a slot's own token back, into a slot that no used entry takes.
    after.scatter_(-1, taken, torch.where(used, entering, slot_map.gather(-1, taken)))

    padding = (0, capacity - most)
    slots = torch.where(used, taken, EMPTY).to(torch.int32)
    return Selection(
        slot_map=after,
        entering=torch.nn.functional.pad(entering, padding, value=EMPTY),
        slots=torch.nn.functional.pad(slots, padding, value=EMPTY),
        overflow=(wanted - capacity).clamp(min=0).to(torch.int32),
    )


def select_workspace(
    rows: int, layers: int, kv_heads: int, budget: int, margin: int, device: torch.device
) -> Tensor:
    """Make scratch of one launch: none."""
    return torch.empty((0, 0), dtype=torch.int64, device=device)


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
) -> None:
    """Apply `select_tokens` to every row of a step.

    The first `sink_tokens` tokens and the newest `recent_tokens` are attended to anyway and do not
    compete. A row has the first of its slots, as many as its budget, which grows or stays.

    Args:
        scores: (R, L, Hkv, capacity) float32, of tokens [0, position]; may be overwritten.
        slot_map: (slots, layers, Hkv, k) int32, changed in place.
        slots: (R,) int32 state slots, no two the same; for a row of slot -1 nothing enters.
        positions: (R,) int32, of each row's current token.
        budgets: (R,) int32, at most k, and at least 1.
        first_layer: index of the first of the L layers in the slot map.
        sink_tokens: how many of the oldest tokens do not compete.
        recent_tokens: how many of the newest tokens do not compete.
        margin: how far beyond k a token may fall before it leaves; in proportion for fewer slots.
        workspace: what `select_workspace` made.
        entering: (R, L, Hkv, C) int32, written in place; see `Selection.entering`.
        entering_slots: (R, L, Hkv, C) int32, written in place; see `Selection.slots`.
        counts: (R, 2) int32; to it are added how many tokens entered, and how many the capacity
            kept out.
    """
    layers = scores.shape[1]
    entering.fill_(EMPTY)
    entering_slots.fill_(EMPTY)
    numbers = zip(slots.tolist(), positions.tolist(), budgets.tolist(), strict=True)
    for row, (slot, position, budget) in enumerate(numbers):
        if slot < 0:
            continue
        tokens = position + 1
        working_set = slot_map[slot, first_layer : first_layer + layers, :, :budget]
        change = select_tokens(
            scores[row, :, :, :tokens],
            working_set,
            range(sink_tokens, max(sink_tokens, tokens - recent_tokens)),
            margin * budget // slot_map.shape[-1],
            entering.shape[-1],
        )
        working_set.copy_(change.slot_map)
        entering[row] = change.entering
        entering_slots[row] = change.slots
        counts[row, 0] += (change.entering != EMPTY).sum().to(torch.int32)
        counts[row, 1] += change.overflow.sum().to(torch.int32)
