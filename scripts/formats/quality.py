"""How good a selection was by the true query of its step, and how good a residency format is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.kernels.select.reference import top_tokens
from cache_rank.pages import PAGE_TOKENS
from scripts.shared.recordings import Recorded


class Quality(msgspec.Struct, frozen=True):
    """What a format loses.

    Errors are vNMSE, E |x - y|² / E |x|², None if not finite.

    Attributes:
        key_error, value_error: without the newest page, which formats may hold as it came.
        output_error: of attention over all tokens.
        score_error: of log-probabilities, both about their mean over the candidates, because what
            all tokens share changes no selection.
        recall: share of the exact k best that are among the k best by the scores.
        attention_mass: share of the candidates' attention that these hold.
    """

    key_error: float | None
    value_error: float | None
    output_error: float | None
    score_error: float | None
    recall: float
    attention_mass: float


def compare(
    sample: Recorded,
    keys: Tensor,
    values: Tensor,
    scores: Sequence[Tensor],
    config: CacheRankConfig,
) -> Quality:
    """Compare with a sample what is read back, keys and values of (layers, Hkv, tokens, D).

    Scores are one tensor a step, (layers, Hkv, position + 1) float32.
    """
    centred, selected = [], []
    steps = zip(sample.positions, sample.queries, scores, strict=True)
    for position, query, found in steps:
        true = score_tokens(query, sample.keys[:, :, : position + 1], config.model.scale)
        candidates = config.candidates_after(position - 1)
        both = [part[..., candidates.start : candidates.stop] for part in (true, found)]
        centred.append([part - part.mean(dim=-1, keepdim=True) for part in both])
        chosen = top_tokens(found[..., :position], candidates, config.sparse_budget)
        selected.append(measure_recall(true, chosen, config, position))
    recall, attention_mass = torch.stack(selected).mean((0, 2, 3)).tolist()
    older = slice(0, sample.tokens - PAGE_TOKENS)
    return Quality(
        key_error=_error(sample.keys[:, :, older], keys[:, :, older]),
        value_error=_error(sample.values[:, :, older], values[:, :, older]),
        output_error=_error(
            _outputs(sample, sample.keys, sample.values), _outputs(sample, keys, values)
        ),
        score_error=_error(*(torch.cat(side, dim=-1) for side in zip(*centred, strict=True))),
        recall=recall,
        attention_mass=attention_mass,
    )


def _error(true: Tensor, found: Tensor) -> float | None:
    """vNMSE; None if it is not finite."""
    error = (true.double() - found.double()).square().sum() / true.double().square().sum()
    return float(error) if error.isfinite() else None


def _outputs(sample: Recorded, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of every step over keys and values: (layers, Hq, steps, D) float32."""
    queries = sample.queries.movedim(0, 2).float()
    mask = queries.new_ones((len(sample.queries), sample.tokens), dtype=torch.bool)
    return scaled_dot_product_attention(
        queries, keys.float(), values.float(), mask.tril(sample.prompt), enable_gqa=True
    )


def measure_recall(
    scores: Tensor, slot_map: Tensor, config: CacheRankConfig, position: int
) -> Tensor:
    """Compare the slots that a step used with exact selection by the true query of that step.

    Recall is the overlap ratio of AsyncSpade, Eq. 1.

    Args:
        scores: (L, Hkv, >= position) float32 by the true queries of the step at `position`.
        slot_map: (L, Hkv, filled) integer, the tokens in slots, chosen after `position - 1`; one
            or more.

    Returns:
        (2, L, Hkv) float32: the share of the exact top tokens that sat in slots, and the share of
        attention probability (the largest of each head group) outside sinks and recent tokens that
        the slots held.
    """
    candidates = config.candidates_after(position - 1)
    exact = top_tokens(scores[..., :position], candidates, slot_map.shape[-1])
    slots = slot_map.to(torch.int64)
    in_slots = torch.zeros_like(scores[..., :position]).scatter(-1, slots, 1.0)
    recall = in_slots.gather(-1, exact).mean(-1)
    probability = scores[..., : candidates.stop].exp()
    held = probability.gather(-1, slots).sum(-1)
    mass = held / probability[..., candidates.start :].sum(-1).clamp(min=1e-30)
    return torch.stack((recall, mass))
