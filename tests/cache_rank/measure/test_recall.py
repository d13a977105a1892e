"""What is measured of a step, against counting by hand."""

from __future__ import annotations

import struct

import pytest
import torch
from small_models import MODELS, small_config
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.kernels.score.reference import score_tokens
from cache_rank.kernels.select.reference import EMPTY, select_tokens
from cache_rank.measure.recall import (
    MeasuredStep,
    RecallMeter,
    measure_recall,
    overlap_distances,
    overlap_ratio,
)

TOKENS = 40


def random_keys(config: CacheRankConfig) -> Tensor:
    """Resident keys (layers, Hkv, tokens, D)."""
    torch.manual_seed(0)
    model = config.model
    keys = torch.randn(model.layers, model.kv_heads, TOKENS, model.head_dim)
    return keys.to(model.torch_dtype)


def random_queries(config: CacheRankConfig, layers: int) -> Tensor:
    return torch.randn(layers, config.model.query_heads, config.model.head_dim)


def slots_of(config: CacheRankConfig, layers: int, tokens: list[int]) -> Tensor:
    """The same tokens in the slots of every head."""
    return torch.tensor(tokens, dtype=torch.int32).expand(layers, config.model.kv_heads, -1)


def ranking_by_hand(
    config: CacheRankConfig, keys: Tensor, query: Tensor
) -> list[tuple[list[int], list[float]]]:
    """Of each kv head of a layer: the candidates, best first, and every token's score.

    `keys` is (Hkv, TOKENS, D), `query` (Hq, D).
    """
    model = config.model
    group = model.query_heads // model.kv_heads
    candidates = range(config.sink_tokens, TOKENS - config.recent_tokens)
    found = []
    for kv_head in range(model.kv_heads):
        heads = query[kv_head * group : (kv_head + 1) * group].double()
        logits = heads @ keys[kv_head].double().T * model.scale
        probability = logits.softmax(-1).amax(0).tolist()
        ranking = sorted(candidates, key=lambda t: (probability[t], t), reverse=True)
        found.append((ranking, probability))
    return found


def by_hand(
    config: CacheRankConfig, keys: Tensor, query: Tensor, held: list[int]
) -> list[tuple[float, float]]:
    """Recall and attention mass of each kv head of a layer with these tokens in its slots."""
    results = []
    for ranking, probability in ranking_by_hand(config, keys, query):
        recall = len(set(ranking[: len(held)]) & set(held)) / len(held)
        mass = sum(probability[token] for token in held)
        results.append((recall, mass / sum(probability[token] for token in ranking)))
    return results


@pytest.mark.parametrize("beyond", [0, 1, 60])
@pytest.mark.parametrize("held", [[5], [7, 2, 30, 11], list(range(2, 10))], ids=len)
@pytest.mark.parametrize("model", MODELS)
def test_equals_counting_by_hand(model: str, held: list[int], beyond: int) -> None:
    config = small_config(MODELS[model])
    keys = random_keys(config)
    queries = random_queries(config, 2)
    scores = score_tokens(queries, keys[1:3], config.model.scale)
    # What a score buffer holds beyond the tokens is not looked at.
    garbage = torch.full((*scores.shape[:2], beyond), float("nan"))
    scores = torch.cat((scores, garbage), dim=-1)
    measured = measure_recall(scores, slots_of(config, 2, held), config, TOKENS)
    assert measured.shape == (2, 2, config.model.kv_heads)
    for layer in range(2):
        expected = by_hand(config, keys[1 + layer], queries[layer], held)
        for head, (recall, mass) in enumerate(expected):
            assert float(measured[0, layer, head]) == pytest.approx(recall, rel=1e-6)
            # A ratio of sums of a few float32 probabilities.
            assert float(measured[1, layer, head]) == pytest.approx(mass, rel=1e-4)


def test_exact_selection_has_full_recall_and_no_selection_holds_more_mass() -> None:
    config = small_config(MODELS["mha"])
    keys, queries = random_keys(config)[:1], random_queries(config, 1)
    scores = score_tokens(queries, keys, config.model.scale)
    candidates = config.candidates_after(TOKENS - 1)
    mirror = slots_of(config, 1, [EMPTY] * config.sparse_budget).clone()
    # Several selections, because a step ships at most `max_swap_tokens` tokens.
    for _ in range(config.sparse_budget):
        mirror = select_tokens(
            scores, mirror, candidates, config.hysteresis, config.max_swap_tokens
        ).mirror
    recall, mass = measure_recall(scores, mirror, config, TOKENS)
    assert (recall == 1.0).all()
    other = slots_of(config, 1, list(range(2, 10)))
    _, other_mass = measure_recall(scores, other, config, TOKENS)
    assert (other_mass > 0).all()
    assert (other_mass < mass).all()
    assert (mass <= 1 + 1e-6).all()


def test_slots_that_hold_every_candidate_hold_all_the_mass() -> None:
    config = small_config(sparse_budget=TOKENS)
    keys, queries = random_keys(config)[:2], random_queries(config, 2)
    scores = score_tokens(queries, keys, config.model.scale)
    slots = slots_of(config, 2, list(config.candidates_after(TOKENS - 1)))
    recall, mass = measure_recall(scores, slots, config, TOKENS)
    assert (recall == 1.0).all()
    assert ((mass - 1).abs() <= TOKENS * torch.finfo(torch.float32).eps).all()


def test_no_slots_in_use_is_not_a_number() -> None:
    config = small_config()
    keys, queries = random_keys(config), random_queries(config, 3)
    scores = score_tokens(queries, keys, config.model.scale)
    measured = measure_recall(scores, slots_of(config, 3, []), config, TOKENS)
    assert measured.shape == (2, 3, config.model.kv_heads)
    assert measured.isnan().all()


def test_measuring_changes_nothing() -> None:
    config = small_config()
    keys, queries = random_keys(config), random_queries(config, 3)
    scores = score_tokens(queries, keys, config.model.scale)
    slots = slots_of(config, 3, [4, 9]).clone()
    before = scores.clone(), slots.clone()
    first = measure_recall(scores, slots, config, TOKENS)
    assert torch.equal(measure_recall(scores, slots, config, TOKENS), first)
    assert torch.equal(scores, before[0])
    assert torch.equal(slots, before[1])


@pytest.mark.parametrize(
    ("window", "distances"), [(1, (1,)), (2, (1, 2)), (7, (1, 2, 4)), (16, (1, 2, 4, 8, 16))]
)
def test_distances_double_up_to_the_window(window: int, distances: tuple[int, ...]) -> None:
    assert overlap_distances(window) == distances


def test_the_overlap_of_two_selections_is_what_they_share() -> None:
    first = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    second = torch.tensor([[3, 9, 0, 8], [7, 6, 5, 4]])
    assert overlap_ratio(first, second, 10).tolist() == [0.5, 1.0]
    assert overlap_ratio(first, 9 - first, 10).tolist() == [0.0, 0.5]


@pytest.mark.parametrize("model", MODELS)
def test_a_measured_step_equals_counting_by_hand(model: str) -> None:
    config = small_config(MODELS[model])
    shape, layers = config.model, range(1, 3)
    keys = random_keys(config)
    ring = torch.randn(2, shape.query_heads, config.query_window + 1, shape.head_dim)
    ring = ring.to(shape.torch_dtype)
    queries, predicted = random_queries(config, 2), random_queries(config, 2)
    held = [7, 2, 30, 11]
    meter = RecallMeter(config)
    meter.measure(
        MeasuredStep(5, 11, TOKENS, layers, wants_slots=True),
        slots_of(config, 2, held),
        queries,
        predicted,
        ring,
        lambda some: score_tokens(some, keys[1:3], shape.scale),
    )
    assert meter.waiting == 1
    (measured,) = meter.take()
    assert (measured.epoch, measured.step, measured.first_layer) == (5, 11, 1)
    assert measured.slots == struct.pack("<4i", *held) * 2 * shape.kv_heads

    def chosen(layer: int, query: Tensor, head: int) -> set[int]:
        return set(ranking_by_hand(config, keys[layers[layer]], query)[head][0][: len(held)])

    for layer in range(2):
        expected = by_hand(config, keys[layers[layer]], queries[layer], held)
        for head, (recall, mass) in enumerate(expected):
            assert measured.held_recall[layer][head] == pytest.approx(recall, rel=1e-6)
            assert measured.held_attention_mass[layer][head] == pytest.approx(mass, rel=1e-4)
            true = chosen(layer, queries[layer], head)
            shared = len(true & chosen(layer, predicted[layer], head)) / len(held)
            assert measured.prediction_overlap[layer][head] == shared
            # A window of 4: distances 1, 2 and 4, of queries at positions 39, 38 and 36.
            for place, distance in enumerate((1, 2, 4)):
                query = ring[layer, :, (TOKENS - distance) % 5]
                shared = len(true & chosen(layer, query, head)) / len(held)
                assert measured.overlap[place][layer][head] == shared
        for head in range(shape.query_heads):
            one, other = queries[layer, head].double(), predicted[layer, head].double()
            cosine = float(one @ other / (one.norm() * other.norm()))
            assert measured.query_cosine[layer][head] == pytest.approx(cosine, abs=1e-6)
    assert len(measured.overlap) == 3


def test_measurements_are_taken_once_and_in_order() -> None:
    config = small_config()
    meter = RecallMeter(config)
    keys = random_keys(config)
    ring = torch.randn(3, config.model.query_heads, 5, config.model.head_dim)
    for step, (epoch, layers) in enumerate(((3, range(2)), (1, range(2, 3)), (3, range(2)))):
        queries = random_queries(config, len(layers))
        meter.measure(
            MeasuredStep(epoch, step, TOKENS, layers, wants_slots=False),
            slots_of(config, len(layers), [4, 9]),
            queries,
            queries,
            ring[layers.start : layers.stop],
            lambda some, layers=layers: score_tokens(
                some, keys[layers.start : layers.stop], config.model.scale
            ),
        )
    taken = meter.take()
    found = [(one.step, one.epoch, one.first_layer) for one in taken]
    assert found == [(0, 3, 0), (1, 1, 2), (2, 3, 0)]
    assert {one.slots for one in taken} == {b""}  # nobody asked
    for measured in taken:
        # The prediction was right.
        assert all(overlap == 1 for heads in measured.prediction_overlap for overlap in heads)
        assert all(
            cosine == pytest.approx(1) for heads in measured.query_cosine for cosine in heads
        )
    assert meter.take() == []
    assert meter.waiting == 0
