"""How good a selection was: measured when the true query of its step has arrived."""

from __future__ import annotations

import torch
from cache_rank_kernels.select.reference import top_tokens
from torch import Tensor

from cache_rank.config import CacheRankConfig


def measure_recall(
    scores: Tensor, mirror: Tensor, config: CacheRankConfig, position: int
) -> Tensor:
    """Compare the slots that a step used with exact selection by the true query of that step.

    Args:
        scores: (L, Hkv, >= position) float32 by the true queries of the step at `position`.
        mirror: (L, Hkv, filled) integer, the tokens that sat in slots, chosen after `position - 1`.
        config: of the cache rank.
        position: of the step.

    Returns:
        (2,) float32: the share of the exact top tokens that sat in slots, and the share of
        attention probability (the largest of each head group) outside sinks and recent tokens that
        the slots held, each averaged over layers and kv heads; NaN when no slot is in use.
    """
    filled = mirror.shape[-1]
    if filled == 0:
        return torch.full((2,), float("nan"), device=scores.device)
    candidates = config.candidates_after(position - 1)
    scores = scores[..., :position]
    exact = top_tokens(scores, candidates, filled)
    selected = torch.zeros_like(scores, dtype=torch.bool)
    selected.scatter_(-1, mirror.to(torch.int64), True)
    recall = selected.gather(-1, exact).float().mean()
    probability = scores.exp()[..., candidates.start : candidates.stop]
    held = (probability * selected[..., candidates.start : candidates.stop]).sum(-1)
    mass = (held / probability.sum(-1).clamp(min=1e-30)).mean()
    return torch.stack((recall, mass))
