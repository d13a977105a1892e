"""How good a selection was: measured when the true query of its step has arrived."""

from __future__ import annotations

import torch
from cache_rank_kernels.select.reference import top_tokens

from cache_rank.config import CacheRankConfig
from cache_rank.sequence import Sequence


def measure_recall(
    sequence: Sequence, config: CacheRankConfig, layers: range, queries: torch.Tensor, position: int
) -> tuple[float, float]:
    """Compare the slots that a step used with exact selection by the true query of that step.

    Args:
        sequence: before the token at `position` is appended to these layers.
        config: of the cache rank.
        layers: which layers.
        queries: (len(layers), Hq, D), the true queries of the step at `position`.
        position: of the step, whose slots were chosen after `position - 1`.

    Returns:
        The share of the exact top tokens that sat in slots, and the share of attention probability
        (the largest of each head group) outside sinks and recent tokens that the slots held, each
        averaged over layers and kv heads; NaN when no slot is in use.
    """
    filled = sequence.filled[layers.start]
    if filled == 0:
        return float("nan"), float("nan")
    candidates = config.candidates_after(position - 1)
    scores = sequence.residency.score(layers, queries.float(), config.model.scale)
    mirror = sequence.mirror[layers.start : layers.stop, :, :filled]
    exact = top_tokens(scores, candidates, filled)
    selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, mirror, True)
    recall = selected.gather(-1, exact).float().mean()
    probability = scores.exp()[..., candidates.start : candidates.stop]
    held = (probability * selected[..., candidates.start : candidates.stop]).sum(-1)
    mass = (held / probability.sum(-1).clamp(min=1e-30)).mean()
    return float(recall), float(mass)
