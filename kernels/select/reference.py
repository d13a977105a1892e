"""Top-k with hysteresis and the difference against the mirror, plain torch: the specification.

AsyncSpade section 4.3 chooses tokens one by one; the slots make the answer a difference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

EMPTY = -1
_LOWEST = torch.iinfo(torch.int64).min


class Selection(NamedTuple):
    """What changes in the slots of each (layer, kv head).

    Attributes:
        mirror: (L, Hkv, k) int64, the token position in each slot after the change; -1 is empty.
        entering: (L, Hkv, capacity) int64, positions of the tokens that enter, best first; -1 pads.
        slots: (L, Hkv, capacity) int32, the slot that each entering token takes; -1 pads.
        overflow: (L, Hkv) int64, how many more tokens would have entered at unlimited capacity.
    """

    mirror: Tensor
    entering: Tensor
    slots: Tensor
    overflow: Tensor


def rank_keys(scores: Tensor, candidates: range) -> Tensor:
    """Map scores to int64 keys whose order is (score, position): unique, so no tie is left open.

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
    """Positions of the `count` best candidates, best first, ties toward the newer token.

    Returns:
        (..., min(count, len(candidates))) int64.
    """
    keys = rank_keys(scores, candidates)
    return keys.topk(min(count, len(candidates)), dim=-1).indices


def select_tokens(
    scores: Tensor, mirror: Tensor, candidates: range, margin: int, capacity: int
) -> Selection:
    """Choose the tokens of the next step and how the slots change.

    The target is the k best candidates. A token already in a slot stays unless it falls out of the
    best k + margin. Tokens enter best first, at most `capacity`; they take empty slots in order,
    then the slots of the worst tokens that fell out. What does not fit keeps its old token.

    Args:
        scores: (L, Hkv, T) float32.
        mirror: (L, Hkv, k) int64 positions, -1 where empty. Empty slots form the tail.
        candidates: the positions that compete.
        margin: how far beyond k a token may fall before it leaves.
        capacity: most tokens that may enter a (layer, kv head).

    Returns:
        The change; the given mirror is not modified.
    """
    budget = mirror.shape[-1]
    target = min(budget, len(candidates))
    capacity_used = min(capacity, target)
    keys = rank_keys(scores, candidates)

    kept_depth = min(budget + margin, len(candidates))
    threshold = keys.topk(kept_depth, dim=-1).values[..., -1:] if kept_depth else None
    filled = mirror != EMPTY
    slot_keys = torch.where(filled, keys.gather(-1, mirror.clamp(min=0)), _LOWEST)
    kept = filled & (slot_keys >= threshold) if threshold is not None else filled
    wanted = target - kept.sum(-1)  # (L, Hkv)

    resident = torch.zeros(
        (*keys.shape[:-1], keys.shape[-1] + 1), dtype=torch.bool, device=keys.device
    )
    resident.scatter_(-1, torch.where(filled, mirror, keys.shape[-1]), True)
    outside = keys.masked_fill(resident[..., :-1], _LOWEST)
    best_outside = outside.topk(capacity_used, dim=-1).indices
    order = torch.arange(capacity_used, device=scores.device)
    enters = order < wanted.clamp(max=capacity_used).unsqueeze(-1)

    slot_order = torch.arange(budget, device=scores.device) + _LOWEST
    leave_order = torch.where(filled, slot_keys, slot_order)
    leave_order = leave_order.masked_fill(kept, torch.iinfo(torch.int64).max)
    taken = leave_order.argsort(dim=-1, stable=True)[..., :capacity_used]

    entering = torch.where(enters, best_outside, EMPTY)
    slots = torch.where(enters, taken, EMPTY)
    new_mirror = mirror.clone()
    # Unused entries write a slot's own token back, into a slot that no used entry takes.
    new_mirror.scatter_(-1, taken, torch.where(enters, best_outside, mirror.gather(-1, taken)))

    padding = (0, capacity - capacity_used)
    return Selection(
        mirror=new_mirror,
        entering=torch.nn.functional.pad(entering, padding, value=EMPTY),
        slots=torch.nn.functional.pad(slots, padding, value=EMPTY).to(torch.int32),
        overflow=(wanted - capacity_used).clamp(min=0),
    )
