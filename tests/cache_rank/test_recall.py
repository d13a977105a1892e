"""Recall and attention mass of the slots against counting by hand."""

from __future__ import annotations

import math

import pytest
import torch
from small_models import MODELS, small_config
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.recall import measure_recall
from cache_rank.sequence import Sequence

CPU = torch.device("cpu")
TOKENS = 40


def sequence_of(config: CacheRankConfig, keys: Tensor) -> Sequence:
    """A sequence that holds keys (layers, tokens, Hkv, D); its values do not matter."""
    sequence = Sequence(1, config, CPU)
    sequence.residency.append(range(config.model.layers), keys, keys)
    return sequence


def random_sequence(config: CacheRankConfig) -> Sequence:
    torch.manual_seed(0)
    model = config.model
    keys = torch.randn(model.layers, TOKENS, model.kv_heads, model.head_dim)
    return sequence_of(config, keys.to(model.torch_dtype))


def fill_slots(sequence: Sequence, layers: range, tokens: list[int]) -> None:
    """Put the same tokens into the slots of every head of some layers."""
    sequence.mirror[layers.start : layers.stop, :, : len(tokens)] = torch.tensor(tokens)
    for layer in layers:
        sequence.filled[layer] = len(tokens)


def by_hand(
    sequence: Sequence, config: CacheRankConfig, layer: int, query: Tensor, held: list[int]
) -> tuple[float, float]:
    """Mean over the kv heads of one layer; `query` is (Hq, D), `held` the tokens in its slots."""
    model = config.model
    group = model.query_heads // model.kv_heads
    everything = torch.arange(TOKENS).expand(1, model.kv_heads, -1)
    keys = sequence.residency.gather(range(layer, layer + 1), everything)[0][0].double()
    candidates = range(config.sink_tokens, TOKENS - config.recent_tokens)
    recalls, masses = [], []
    for kv_head in range(model.kv_heads):
        heads = query[kv_head * group : (kv_head + 1) * group].double()
        probability = (heads @ keys[kv_head].T * model.scale).softmax(-1).amax(0).tolist()
        ranking = sorted(candidates, key=lambda t: (probability[t], t), reverse=True)
        exact = ranking[: len(held)]
        recalls.append(len(set(exact) & set(held)) / len(held))
        masses.append(sum(probability[t] for t in held) / sum(probability[t] for t in candidates))
    return sum(recalls) / len(recalls), sum(masses) / len(masses)


@pytest.mark.parametrize("held", [[5], [7, 2, 30, 11], list(range(2, 10))], ids=len)
@pytest.mark.parametrize("model", MODELS)
def test_equals_counting_by_hand(model: str, held: list[int]) -> None:
    config = small_config(MODELS[model])
    sequence = random_sequence(config)
    layers = range(1, 3)
    queries = torch.randn(2, config.model.query_heads, config.model.head_dim)
    fill_slots(sequence, layers, held)
    recall, mass = measure_recall(sequence, config, layers, queries, TOKENS)
    expected = [by_hand(sequence, config, layer, queries[layer - 1], held) for layer in layers]
    # Means of a few float32 ratios; the recalls are ratios of small integers.
    assert recall == pytest.approx(sum(r for r, _ in expected) / 2, rel=1e-6)
    assert mass == pytest.approx(sum(m for _, m in expected) / 2, rel=1e-4)


def test_exact_selection_has_full_recall_and_no_selection_holds_more_mass() -> None:
    config = small_config(MODELS["mha"])
    sequence = random_sequence(config)
    layers = range(0, 1)
    queries = torch.randn(1, config.model.query_heads, config.model.head_dim)
    # Several selections, because a step ships at most `delta_capacity` tokens.
    for _ in range(config.sparse_budget):
        sequence.select(layers, queries, TOKENS - 1)
    recall, mass = measure_recall(sequence, config, layers, queries, TOKENS)
    assert recall == 1.0
    fill_slots(sequence, layers, list(range(2, 10)))
    _, other_mass = measure_recall(sequence, config, layers, queries, TOKENS)
    assert 0 < other_mass < mass <= 1 + 1e-6


def test_slots_that_hold_every_candidate_hold_all_the_mass() -> None:
    config = small_config(sparse_budget=TOKENS)
    sequence = random_sequence(config)
    layers = range(0, 2)
    fill_slots(sequence, layers, list(config.candidates_after(TOKENS - 1)))
    queries = torch.randn(2, config.model.query_heads, config.model.head_dim)
    recall, mass = measure_recall(sequence, config, layers, queries, TOKENS)
    assert recall == 1.0
    assert mass == pytest.approx(1.0, abs=TOKENS * torch.finfo(torch.float32).eps)


def test_no_slots_in_use_is_not_a_number() -> None:
    config = small_config()
    sequence = random_sequence(config)
    queries = torch.randn(3, config.model.query_heads, config.model.head_dim)
    measured = measure_recall(sequence, config, range(3), queries, TOKENS)
    assert all(math.isnan(value) for value in measured)


def test_measuring_changes_nothing() -> None:
    config = small_config()
    sequence = random_sequence(config)
    fill_slots(sequence, range(3), [4, 9])
    mirror = sequence.mirror.clone()
    queries = torch.randn(3, config.model.query_heads, config.model.head_dim)
    first = measure_recall(sequence, config, range(3), queries, TOKENS)
    assert measure_recall(sequence, config, range(3), queries, TOKENS) == first
    assert torch.equal(sequence.mirror, mirror)
    assert sequence.residency.tokens == TOKENS
