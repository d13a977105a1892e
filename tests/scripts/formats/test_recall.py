"""What is measured of a step, against counting by hand."""

from __future__ import annotations

import pytest
import torch
from small_models import MODELS, small_config
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.score.reference import score_tokens
from scripts.formats.quality import measure_recall

TOKENS = 40


def by_hand(
    config: CacheRankConfig, keys: Tensor, query: Tensor, held: list[int]
) -> list[tuple[float, float]]:
    """Recall and attention mass of each kv head of a layer with these tokens in its slots.

    `keys` is (Hkv, TOKENS, D), `query` (Hq, D).
    """
    model = config.model
    group = model.query_heads // model.kv_heads
    candidates = range(config.sink_tokens, TOKENS - config.recent_tokens)
    results = []
    for kv_head in range(model.kv_heads):
        heads = query[kv_head * group : (kv_head + 1) * group].double()
        logits = heads @ keys[kv_head].double().T * model.scale
        probability = logits.softmax(-1).amax(0).tolist()
        ranking = sorted(candidates, key=lambda t: (probability[t], t), reverse=True)
        recall = len(set(ranking[: len(held)]) & set(held)) / len(held)
        mass = sum(probability[token] for token in held)
        results.append((recall, mass / sum(probability[token] for token in ranking)))
    return results


@pytest.mark.parametrize(
    ("model", "held", "beyond"),
    [("mha", [5], 0), ("gqa", [7, 2, 30, 11], 1), ("mqa", list(range(2, 10)), 60)],
    ids=str,
)
def test_equals_counting_by_hand(model: str, held: list[int], beyond: int) -> None:
    config, shape = small_config(MODELS[model]), MODELS[model]
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((2, shape.kv_heads, TOKENS, shape.head_dim), generator=generator)
    queries = torch.randn((2, shape.query_heads, shape.head_dim), generator=generator)
    scores = score_tokens(queries, keys, shape.scale)
    # What a score buffer holds beyond the tokens is not looked at.
    garbage = torch.full((*scores.shape[:2], beyond), float("nan"))
    scores = torch.cat((scores, garbage), dim=-1)
    slots = torch.tensor(held, dtype=torch.int32).expand(2, shape.kv_heads, -1)
    measured = measure_recall(scores, slots, config, TOKENS)
    assert measured.shape == (2, 2, shape.kv_heads)
    for layer in range(2):
        expected = by_hand(config, keys[layer], queries[layer], held)
        for head, (recall, mass) in enumerate(expected):
            assert float(measured[0, layer, head]) == pytest.approx(recall, rel=1e-6)
            # A ratio of sums of a few float32 probabilities.
            assert float(measured[1, layer, head]) == pytest.approx(mass, rel=1e-4)
