"""How good a selection was, by the true query of its step.

    recall              the share of the top k by the true query that sat in slots
    attention mass      the share of attention probability that the slots held

The tokens that compete are those of that step, and k is the slots in use. The scores are by
whichever keys there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.select.reference import top_tokens


def overlap_ratio(first: Tensor, second: Tensor, tokens: int) -> Tensor:
    """Share of tokens that two selections have in common (AsyncSpade Eq. 1).

    Args:
        first, second: (..., k) integer positions within [0, tokens), each at most once.
        tokens: number of resident tokens.

    Returns:
        (...) float32.
    """
    chosen = torch.zeros((*first.shape[:-1], tokens), dtype=torch.bool, device=first.device)
    chosen.scatter_(-1, first.to(torch.int64), True)
    return chosen.gather(-1, second.to(torch.int64)).float().mean(-1)


def measure_recall(
    scores: Tensor, slot_map: Tensor, config: CacheRankConfig, position: int
) -> Tensor:
    """Compare the slots that a step used with exact selection by the true query of that step.

    Args:
        scores: (L, Hkv, >= position) float32 by the true queries of the step at `position`.
        slot_map: (L, Hkv, filled) integer, the tokens in slots, chosen after `position - 1`.
        config: the cache rank's policy.
        position: the step's position.

    Returns:
        (2, L, Hkv) float32: the share of the exact top tokens that sat in slots, and the share of
        attention probability (the largest of each head group) outside sinks and recent tokens that
        the slots held; NaN when no slot is in use.
    """
    candidates = config.candidates_after(position - 1)
    exact = top_tokens(scores[..., :position], candidates, slot_map.shape[-1])
    return torch.stack(
        (overlap_ratio(slot_map, exact, position), _attention_mass(scores, slot_map, candidates))
    )


def _attention_mass(scores: Tensor, slot_map: Tensor, candidates: range) -> Tensor:
    """The share of the candidates' attention probability that slots held, (L, Hkv)."""
    probability = scores[..., : candidates.stop].exp()
    held = probability.gather(-1, slot_map.to(torch.int64)).sum(-1)
    mass = held / probability[..., candidates.start :].sum(-1).clamp(min=1e-30)
    return mass if slot_map.shape[-1] else torch.full_like(mass, float("nan"))
