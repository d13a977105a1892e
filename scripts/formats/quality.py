"""How good a residency format is: errors, recall and attention mass."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.kernels.select.reference import top_tokens
from cache_rank.pages import PAGE_TOKENS
from scripts.formats.recall import measure_recall
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
    """Compare what is read back with a sample.

    Args:
        sample: on the device of all else.
        keys, values: what is read back, (layers, Hkv, tokens, D).
        scores: one a step, (layers, Hkv, position + 1) float32.
        config: says how many tokens are selected, and among which.
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
        key_error=_error([sample.keys[:, :, older]], [keys[:, :, older]]),
        value_error=_error([sample.values[:, :, older]], [values[:, :, older]]),
        output_error=_error(
            _outputs(sample, sample.keys, sample.values), _outputs(sample, keys, values)
        ),
        score_error=_error(*map(list, zip(*centred, strict=True))),
        recall=recall,
        attention_mass=attention_mass,
    )


def _error(true: Sequence[Tensor], found: Sequence[Tensor]) -> float | None:
    """vNMSE over all the tensors; None if it is not finite."""
    differences = [one.float() - other.float() for one, other in zip(true, found, strict=True)]
    error = _energy(differences) / _energy(true)
    return float(error) if error.isfinite() else None


def _energy(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.float().square().sum().double() for tensor in tensors]).sum()


def _outputs(sample: Recorded, keys: Tensor, values: Tensor) -> list[Tensor]:
    """Attention of every step over keys and values: (layers, Hq, D) float32 each."""
    outputs = []
    for position, query in zip(sample.positions, sample.queries, strict=True):
        grouped = query.float().unflatten(1, (keys.shape[1], -1))  # (layers, Hkv, G, D)
        logits = (
            grouped
            @ keys[:, :, : position + 1].float().transpose(-1, -2)
            * sample.queries.shape[-1] ** -0.5
        )
        output = logits.softmax(dim=-1) @ values[:, :, : position + 1].float()
        outputs.append(output.flatten(1, 2))
    return outputs
