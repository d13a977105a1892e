"""Selection against a plain Python statement of the same rules, over scores full of ties."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from cache_rank_kernels.select.reference import (
    EMPTY,
    Selection,
    rank_keys,
    select_tokens,
    top_tokens,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LAYERS, HEADS = 2, 2


def python_ranking(scores: list[float], candidates: range) -> list[int]:
    """Candidates best first: by score, ties toward the newer token, NaN below everything."""

    def key(token: int) -> tuple[bool, float, int]:
        score = scores[token]
        return (False, 0.0, token) if math.isnan(score) else (True, score, token)

    return sorted(candidates, key=key, reverse=True)


@dataclass(frozen=True)
class PythonSelection:
    mirror: list[int]
    entering: list[int]
    slots: list[int]
    overflow: int


def python_select(
    scores: list[float], mirror: list[int], candidates: range, margin: int, capacity: int
) -> PythonSelection:
    """One head."""
    budget = len(mirror)
    ranking = python_ranking(scores, candidates)
    resident = [token for token in mirror if token != EMPTY]
    kept = [token for token in resident if token in ranking[: budget + margin]]
    wanted = min(budget, len(ranking)) - len(kept)
    entering = [token for token in ranking if token not in resident][: min(wanted, capacity)]

    empty = [slot for slot, token in enumerate(mirror) if token == EMPTY]
    fallen = [slot for slot, token in enumerate(mirror) if token != EMPTY and token not in kept]
    fallen.sort(key=lambda slot: -ranking.index(mirror[slot]))  # worst first
    slots = (empty + fallen)[: len(entering)]
    after = list(mirror)
    for slot, token in zip(slots, entering, strict=True):
        after[slot] = token
    return PythonSelection(after, entering, slots, max(0, wanted - capacity))


@dataclass(frozen=True)
class Policy:
    budget: int
    margin: int
    capacity: int
    sinks: int = 1
    recent: int = 2

    def candidates(self, tokens: int) -> range:
        return range(self.sinks, max(self.sinks, tokens - self.recent))

    def empty_mirror(self) -> Tensor:
        return torch.full((LAYERS, HEADS, self.budget), EMPTY)

    def apply(self, scores: Tensor, mirror: Tensor) -> Selection:
        candidates = self.candidates(scores.shape[-1])
        return select_tokens(scores, mirror, candidates, self.margin, self.capacity)


def heads(tensor: Tensor) -> list[list]:
    return tensor.flatten(0, 1).tolist()


def assert_rules_hold(policy: Policy, scores: Tensor, before: Tensor, change: Selection) -> None:
    """Compare with the Python statement, and check what must hold whatever the scores."""
    candidates = policy.candidates(scores.shape[-1])
    wanted = min(policy.budget, len(candidates))
    rows = zip(
        heads(scores),
        heads(before),
        heads(change.mirror),
        heads(change.entering),
        heads(change.slots),
        change.overflow.flatten().tolist(),
        strict=True,
    )
    for score, old, new, entering, slots, overflow in rows:
        expected = python_select(score, old, candidates, policy.margin, policy.capacity)
        padding = [EMPTY] * (policy.capacity - len(expected.entering))
        assert new == expected.mirror
        assert entering == expected.entering + padding
        assert slots == expected.slots + padding
        assert overflow == expected.overflow

        filled = [token for token in new if token != EMPTY]
        assert len(set(filled)) == len(filled), "a token sits in two slots"
        assert all(token in candidates for token in filled)
        assert new[: len(filled)] == filled, "empty slots are not the tail"
        filled_before = sum(token != EMPTY for token in old)
        assert len(filled) == min(wanted, filled_before + policy.capacity)
        for slot, token in enumerate(old):
            if token != EMPTY and token in new:
                assert new[slot] == token, "a token that stays has moved"


# Coarse scores tie often. The extremes of float32 are left out: an infinity stands for them.
one_score = st.one_of(
    st.sampled_from([math.nan, -math.inf, -0.0, 0.0, -1.0, -2.0, -3.0]),
    st.floats(min_value=-(2.0**100), max_value=0.0, width=32),
)


@st.composite
def score_tensors(draw: st.DrawFn, tokens: int) -> Tensor:
    count = LAYERS * HEADS * tokens
    values = draw(st.lists(one_score, min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float32).view(LAYERS, HEADS, tokens)


policies = st.builds(
    Policy,
    budget=st.integers(1, 6),
    margin=st.sampled_from([0, 1, 2, 100]),
    capacity=st.integers(1, 8),
    sinks=st.integers(0, 2),
    recent=st.integers(0, 3),
)


@settings(deadline=None)
@given(policies, st.data())
def test_follows_the_rules_step_after_step(policy: Policy, data: st.DataObject) -> None:
    """A sequence that grows; every step's mirror is the start of the next."""
    mirror = policy.empty_mirror()
    tokens = data.draw(st.integers(1, 8))
    for _ in range(data.draw(st.integers(1, 4))):
        scores = data.draw(score_tensors(tokens))
        before = mirror.clone()
        change = policy.apply(scores, mirror)
        assert torch.equal(mirror, before), "the given mirror was modified"
        assert_rules_hold(policy, scores, before, change)
        mirror = change.mirror
        tokens += data.draw(st.integers(0, 4))


@dataclass(frozen=True)
class Shape:
    name: str
    policy: Policy
    tokens: int


SHAPES = (
    Shape("one-slot", Policy(budget=1, margin=0, capacity=1), 40),
    Shape("as-many-slots-as-candidates", Policy(budget=37, margin=0, capacity=5), 40),
    Shape("more-slots-than-candidates", Policy(budget=64, margin=0, capacity=5), 40),
    Shape("no-candidates", Policy(budget=4, margin=3, capacity=2), 3),
    Shape("one-candidate", Policy(budget=4, margin=3, capacity=2), 4),
    Shape("capacity-beyond-slots", Policy(budget=8, margin=0, capacity=20), 40),
    Shape("margin-beyond-candidates", Policy(budget=8, margin=1000, capacity=4), 40),
    Shape("realistic", Policy(budget=32, margin=8, capacity=4, sinks=4, recent=16), 200),
)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_follows_the_rules_while_scores_drift(shape: Shape) -> None:
    torch.manual_seed(0)
    scores = torch.randn(LAYERS, HEADS, shape.tokens)
    mirror = shape.policy.empty_mirror()
    for _ in range(30):
        change = shape.policy.apply(scores, mirror)
        assert_rules_hold(shape.policy, scores, mirror, change)
        mirror = change.mirror
        scores = 0.9 * scores + 0.4 * torch.randn_like(scores)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_constant_scores_without_margin_converge_to_the_exact_top(shape: Shape) -> None:
    torch.manual_seed(0)
    policy = Policy(shape.policy.budget, 0, shape.policy.capacity)
    # A full mirror of the worst tokens: everything must be exchanged, `capacity` at a time.
    scores = torch.randint(-9, 0, (LAYERS, HEADS, shape.tokens)).float()
    mirror = policy.empty_mirror()
    for _ in range(math.ceil(policy.budget / policy.capacity)):
        mirror = policy.apply(-scores, mirror).mirror
    for _ in range(math.ceil(policy.budget / policy.capacity)):
        mirror = policy.apply(scores, mirror).mirror
    for score, slots in zip(heads(scores), heads(mirror), strict=True):
        exact = python_ranking(score, policy.candidates(shape.tokens))[: policy.budget]
        assert {token for token in slots if token != EMPTY} == set(exact)
    settled = policy.apply(scores, mirror)
    assert torch.equal(settled.mirror, mirror)
    assert (settled.entering == EMPTY).all()
    assert (settled.overflow == 0).all()


def test_a_token_within_the_margin_stays_and_one_beyond_it_leaves() -> None:
    policy = Policy(budget=2, margin=1, capacity=2, sinks=0, recent=0)
    mirror = torch.tensor([0, 1]).expand(LAYERS, HEADS, -1)
    # Token 1 is third best, within k + margin = 3; token 0 is fourth.
    scores = torch.tensor([-4.0, -3.0, -1.0, -2.0]).expand(LAYERS, HEADS, -1)
    change = policy.apply(scores, mirror)
    assert change.mirror[0, 0].tolist() == [2, 1]
    assert change.entering[0, 0].tolist() == [2, EMPTY]
    assert change.slots[0, 0].tolist() == [0, EMPTY]


def test_the_worst_token_leaves_first_and_the_best_enters_first() -> None:
    policy = Policy(budget=3, margin=0, capacity=2, sinks=0, recent=0)
    mirror = torch.tensor([1, 0, 2]).expand(LAYERS, HEADS, -1)
    scores = torch.tensor([-9.0, -8.0, -7.0, -2.0, -1.0, -3.0]).expand(LAYERS, HEADS, -1)
    change = policy.apply(scores, mirror)
    assert change.entering[0, 0].tolist() == [4, 3]
    assert change.slots[0, 0].tolist() == [1, 0]
    assert change.mirror[0, 0].tolist() == [3, 4, 2]
    assert change.overflow[0, 0] == 1


def test_heads_are_chosen_independently() -> None:
    torch.manual_seed(0)
    policy = Policy(budget=5, margin=2, capacity=3)
    scores = torch.randn(LAYERS, HEADS, 30)
    mirror = policy.apply(torch.randn(LAYERS, HEADS, 30), policy.empty_mirror()).mirror
    together = policy.apply(scores, mirror)
    for layer in range(LAYERS):
        for head in range(HEADS):
            one = (slice(layer, layer + 1), slice(head, head + 1))
            alone = policy.apply(scores[one], mirror[one])
            for joint, single in zip(together, alone, strict=True):
                assert torch.equal(joint[one], single)


@settings(deadline=None)
@given(st.lists(one_score, min_size=1, max_size=12), st.data())
def test_rank_keys_order_by_score_and_then_position(
    scores: list[float], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(scores)))
    candidates = range(start, data.draw(st.integers(start, len(scores))))
    keys = rank_keys(torch.tensor(scores), candidates)
    by_key = sorted(candidates, key=lambda token: int(keys[token]), reverse=True)
    assert by_key == python_ranking(scores, candidates)
    inside = [int(keys[token]) for token in candidates]
    outside = [int(keys[token]) for token in range(len(scores)) if token not in candidates]
    assert len(set(inside)) == len(inside)
    assert all(low < key for low in outside for key in inside)


@settings(deadline=None)
@given(st.lists(one_score, min_size=1, max_size=12), st.integers(0, 14), st.data())
def test_top_tokens_are_the_head_of_the_ranking(
    scores: list[float], count: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(scores)))
    candidates = range(start, data.draw(st.integers(start, len(scores))))
    best = top_tokens(torch.tensor(scores), candidates, count)
    assert best.tolist() == python_ranking(scores, candidates)[:count]
