"""Selection: reference against the rules in plain Python, Triton against the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cache_rank.kernels.select import reference, triton
from cache_rank.kernels.select.reference import (
    EMPTY,
    MOST_SLOTS,
    Selection,
    select_tokens,
    top_tokens,
)

LAYERS, HEADS = 2, 2


def python_ranking(scores: list[float], candidates: range) -> list[int]:
    """Candidates best first: by score, ties toward the newer token, NaN below everything."""

    def key(token: int) -> tuple[bool, float, int]:
        score = scores[token]
        return (False, 0.0, token) if math.isnan(score) else (True, score, token)

    return sorted(candidates, key=key, reverse=True)


def python_select(
    scores: list[float], slot_map: list[int], candidates: range, margin: int, capacity: int
) -> tuple[list[int], list[int], list[int], int]:
    """One head of a `Selection`."""
    budget = len(slot_map)
    ranking = python_ranking(scores, candidates)
    resident = [token for token in slot_map if token != EMPTY]
    kept = [token for token in resident if token in ranking[: budget + margin]]
    wanted = min(budget, len(ranking)) - len(kept)
    outside = [token for token in ranking if token not in resident]
    entering = sorted(outside[: min(wanted, capacity)])

    empty = [slot for slot, token in enumerate(slot_map) if token == EMPTY]
    fallen = [slot for slot, token in enumerate(slot_map) if token != EMPTY and token not in kept]
    # Those that do not compete leave first, then the lowest.
    rank = {token: place for place, token in enumerate(ranking)}
    fallen.sort(key=lambda slot: rank.get(slot_map[slot], len(rank)), reverse=True)
    slots = (empty + sorted(fallen[: max(0, len(entering) - len(empty))]))[: len(entering)]
    after = list(slot_map)
    for slot, token in zip(slots, entering, strict=True):
        after[slot] = token
    padding = [EMPTY] * (capacity - len(entering))
    return after, entering + padding, slots + padding, max(0, wanted - capacity)


@dataclass(frozen=True)
class Policy:
    budget: int
    margin: int
    capacity: int
    sinks: int = 1
    recent: int = 2

    def candidates(self, tokens: int) -> range:
        return range(self.sinks, max(self.sinks, tokens - self.recent))

    def empty_slot_map(self) -> Tensor:
        return torch.full((LAYERS, HEADS, self.budget), EMPTY, dtype=torch.int32)

    def apply(self, scores: Tensor, slot_map: Tensor) -> Selection:
        candidates = self.candidates(scores.shape[-1])
        return select_tokens(scores, slot_map, candidates, self.margin, self.capacity)


def assert_rules_hold(policy: Policy, scores: Tensor, before: Tensor, change: Selection) -> None:
    """Compare with the Python statement, and check what must hold whatever the scores."""
    candidates = policy.candidates(scores.shape[-1])
    wanted = min(policy.budget, len(candidates))
    of_heads = (part.flatten(0, 1).tolist() for part in (scores, before, *change))
    for score, old, new, *rest in zip(*of_heads, strict=True):
        expected = python_select(score, old, candidates, policy.margin, policy.capacity)
        assert (new, *rest) == expected

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


@given(policies, st.data())
def test_follows_the_rules_step_after_step(policy: Policy, data: st.DataObject) -> None:
    """A sequence that grows; every step's slot map is the start of the next."""
    slot_map = policy.empty_slot_map()
    tokens = data.draw(st.integers(1, 8))
    for _ in range(data.draw(st.integers(1, 4))):
        scores = data.draw(score_tensors(tokens))
        before = slot_map.clone()
        change = policy.apply(scores, slot_map)
        assert torch.equal(slot_map, before), "the given slot map was modified"
        assert_rules_hold(policy, scores, before, change)
        slot_map = change.slot_map
        tokens += data.draw(st.integers(0, 4))


@pytest.mark.parametrize(
    ("policy", "before", "scores", "expected"),
    [
        # Token 1 is third best, within k + margin = 3; token 0 is fourth.
        (Policy(2, 1, 2, 0, 0), [0, 1], [-4, -3, -1, -2], ([2, 1], [2, -1], [0, -1], 0)),
        # The best enter, and take the slots in ascending order.
        (
            Policy(3, 0, 2, 0, 0),
            [1, 0, 2],
            [-9, -8, -7, -2, -1, -3],
            ([3, 4, 2], [3, 4], [0, 1], 1),
        ),
        # The lowest leave where not all that fell out can.
        (Policy(3, 0, 1, 0, 0), [1, 0, 2], [-9, -8, -7, -2, -1, -3], ([1, 4, 2], [4], [1], 2)),
        # Empty slots fill before others are taken.
        (Policy(4, 0, 3, 0, 0), [0, -1, 1, -1], range(8), ([7, 5, 1, 6], [5, 6, 7], [1, 3, 0], 1)),
        # A token that no longer competes gives its slot up.
        (Policy(2, 9, 2, 1, 0), [0, 9], [0] * 4, ([2, 3], [2, 3], [0, 1], 0)),
    ],
)
def test_by_hand(
    policy: Policy, before: list[int], scores: Sequence[float], expected: tuple[Any, ...]
) -> None:
    slot_map = torch.tensor(before, dtype=torch.int32).expand(LAYERS, HEADS, -1)
    change = policy.apply(torch.tensor(scores).float().expand(LAYERS, HEADS, -1), slot_map)
    assert tuple(part[1, 0].tolist() for part in change) == expected


@given(st.lists(one_score, min_size=1, max_size=12), st.integers(0, 14), st.data())
def test_top_tokens_are_the_head_of_the_ranking(
    scores: list[float], count: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(scores)))
    candidates = range(start, data.draw(st.integers(start, len(scores))))
    best = top_tokens(torch.tensor(scores), candidates, count)
    assert best.tolist() == python_ranking(scores, candidates)[:count]


class Outputs(NamedTuple):
    entering: Tensor
    entering_slots: Tensor
    counts: Tensor


def int32(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Batch:
    """Rows of a step, of a state with ten slots and a layer before those of the group.

    Each row may fill as many slots as its budget; by default all.
    """

    name: str
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    policy: Policy
    scores: str = "random"
    width: int = 32
    layers: int = 1
    kv_heads: int = 1
    budgets: tuple[int, ...] = ()

    def empty_slot_map(self, device: torch.device) -> Tensor:
        shape = (10, self.layers + 1, self.kv_heads, self.policy.budget)
        return torch.full(shape, EMPTY, dtype=torch.int32, device=device)

    def draw_scores(self, generator: torch.Generator, row_capacity: int) -> Tensor:
        shape = (len(self.positions), self.layers, self.kv_heads, row_capacity)
        scores = torch.randn(shape, generator=generator)
        match self.scores:
            case "ties":
                scores = scores.round()
            case "equal":
                scores.fill_(-1.0)
            case "not-finite":
                scores[scores > 1.0] = math.nan
                scores[scores < -0.3] = -math.inf
                scores[..., ::7] = -0.0
                scores[..., ::9] = 0.0
            case "best-share-a-group":
                scores[..., 3 :: 2 * self.width] += 100.0
        return scores

    def select(
        self, implementation: Any, scores: Tensor, slot_map: Tensor, grown: int, **options: int
    ) -> Outputs:
        """Change the slot map in place; the rows have grown by that many tokens."""
        device, policy = slot_map.device, self.policy
        lists = torch.full((2, *scores.shape[:3], policy.capacity), 77, dtype=torch.int32)
        counts = torch.full((len(self.slots), 2), 5, dtype=torch.int32, device=device)
        outputs = Outputs(*lists.to(device), counts)
        workspace = implementation.select_workspace(
            len(self.slots), self.layers, self.kv_heads, policy.budget, policy.margin, device
        )
        implementation.select_step(
            scores.to(device, copy=True),
            slot_map,
            int32(self.slots, device),
            int32([position + grown for position in self.positions], device),
            int32(self.budgets or [policy.budget] * len(self.slots), device),
            1,
            policy.sinks,
            policy.recent,
            policy.margin,
            workspace,
            *outputs,
            **options,
        )
        return outputs


def test_reference_step_selects_for_every_row_alone() -> None:
    budgets = (5, 2, 5, 3)
    batch = Batch("", (30, 3, 2, 17), (4, 0, -1, 9), Policy(5, 2, 3), layers=2, budgets=budgets)
    scores = batch.draw_scores(torch.Generator().manual_seed(0), 40)
    slot_map = batch.empty_slot_map(torch.device("cpu"))
    slot_map[4, 1:] = torch.arange(1, 6)
    before = slot_map.clone()
    outputs = batch.select(reference, scores, slot_map, 0)
    for row, (position, slot) in enumerate(zip(batch.positions, batch.slots, strict=True)):
        if slot < 0:
            assert (outputs.entering[row] == EMPTY).all()
            assert (outputs.entering_slots[row] == EMPTY).all()
            assert outputs.counts[row].tolist() == [5, 5]
            continue
        budget = budgets[row]
        policy = dataclasses.replace(batch.policy, budget=budget, margin=2 * budget // 5)
        change = policy.apply(scores[row, :, :, : position + 1], before[slot, 1:, :, :budget])
        assert torch.equal(slot_map[slot, 1:, :, :budget], change.slot_map)
        assert (slot_map[slot, 1:, :, budget:] == EMPTY).all()
        assert torch.equal(outputs.entering[row], change.entering)
        assert torch.equal(outputs.entering_slots[row], change.slots)
        entered = int((change.entering != EMPTY).sum())
        assert outputs.counts[row].tolist() == [5 + entered, 5 + int(change.overflow.sum())]
    untouched = [slot for slot in range(10) if slot not in batch.slots]
    assert torch.equal(slot_map[untouched], before[untouched])
    assert torch.equal(slot_map[:, 0], before[:, 0])


LONG, RAGGED = (110,), (60, 3, 2, 20)
SMALL = Policy(budget=12, margin=4, capacity=7)

BATCHES = (
    Batch("ragged", RAGGED, (7, 3, 9, -1), SMALL, layers=2, kv_heads=2),
    Batch("budgets", RAGGED, (7, 3, 9, -1), SMALL, layers=2, kv_heads=2, budgets=(9, 2, 1, 12)),
    Batch("ties", LONG, (0,), SMALL, "ties"),
    Batch("equal-in-a-short-list", LONG, (0,), SMALL, "equal", 16),
    Batch("not-finite-in-a-short-list", LONG, (0,), SMALL, "not-finite", 16),
    Batch("best-share-a-group", LONG, (0,), SMALL, "best-share-a-group", 16),
    Batch("budget-of-all-tokens", (31,), (2,), Policy(32, 0, 18, sinks=0, recent=0)),
    Batch("budget-beyond-all-tokens", (31,), (2,), Policy(50, 8, 33, sinks=0, recent=0), width=64),
    Batch("seven-tokens-a-group", LONG, (0,), Policy(5, 2, 3), width=8),
    Batch("one-slot", (31,), (2,), Policy(1, 0, 1)),
    Batch("capacity-beyond-slots", (90,), (2,), Policy(5, 0, 20)),
    Batch("margin-beyond-candidates", (50,), (2,), Policy(8, 100, 3), width=64),
    Batch("one-token", (0,), (0,), Policy(3, 1, 2, sinks=0, recent=0)),
)


def assert_steps_agree(
    batch: Batch, device: torch.device, slot_map: Tensor, steps: list[Tensor], **options: int
) -> Tensor:
    """Select by both, each carrying its slot map over, while every row grows by a token a step."""
    reference_slot_map = slot_map.clone()
    for grown, scores in enumerate(steps):
        expected = batch.select(reference, scores, reference_slot_map, grown)
        actual = batch.select(triton, scores, slot_map, grown, **options)
        for name in Outputs._fields:
            assert torch.equal(getattr(actual, name), getattr(expected, name)), (grown, name)
        assert torch.equal(slot_map, reference_slot_map), grown
    return slot_map


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name)
def test_triton_equals_reference_step_after_step(
    batch: Batch, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several programs find the maxima of a row, and each thing is read in several times."""
    monkeypatch.setattr(triton, "LAUNCH", triton.Launch(groups=8, rounds=2, visited=2))
    generator = torch.Generator().manual_seed(1)
    steps = [batch.draw_scores(generator, max(batch.positions) + 4) for _ in range(2)]
    slot_map = batch.empty_slot_map(device)
    assert_steps_agree(batch, device, slot_map, steps, width=batch.width)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_triton_fills_slots_that_are_empty_or_stale(device: torch.device) -> None:
    """Gaps in the slot map, and tokens that do not compete, some of them beyond the row."""
    batch = Batch("", (60, 40), (1, 2), Policy(12, 2, 5, sinks=2, recent=3))
    slot_map = batch.empty_slot_map(device)
    slot_map[..., ::3] = int32([1, 9, 5000, 59], device)
    steps = [batch.draw_scores(torch.Generator().manual_seed(2), 64) for _ in range(2)]
    assert_steps_agree(batch, device, slot_map, steps, width=batch.width)


def test_triton_of_no_rows(device: torch.device) -> None:
    batch = Batch("", (), (), SMALL)
    slot_map = batch.empty_slot_map(device)
    batch.select(triton, torch.empty((0, 1, 1, 8)), slot_map, 0)
    assert (slot_map == EMPTY).all()


FULL_POLICY = Policy(budget=2048, margin=256, capacity=128, sinks=4, recent=64)
FULL_BATCHES = (
    Batch("32k", (32700,) * 6, tuple(range(6)), FULL_POLICY, layers=8, kv_heads=8),
    Batch("128k", (131000, 99999, 2500, 300), (1, 0, 3, 2), FULL_POLICY, layers=2, kv_heads=8),
    Batch("32k-ties", (32700,) * 2, (0, 1), FULL_POLICY, "ties", layers=2, kv_heads=8),
    Batch("32k-budgets", (32700,) * 2, (0, 1), FULL_POLICY, layers=2, budgets=(2048, 999)),
    Batch("32k-equal", (32700,) * 2, (0, 1), FULL_POLICY, "equal", layers=2, kv_heads=8),
    Batch("most-slots", (60000,) * 2, (0, 1), Policy(MOST_SLOTS, MOST_SLOTS, 512)),
)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", FULL_BATCHES, ids=lambda batch: batch.name)
@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
def test_triton_at_full_size(batch: Batch, filled: bool) -> None:
    """Scores drift from step to step, as those of a sequence do."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(3)
    row_capacity = max(batch.positions) + 5
    steps = [batch.draw_scores(generator, row_capacity)]
    for _ in range(3):
        fresh = batch.draw_scores(generator, row_capacity)
        steps.append(0.98 * steps[-1] + 0.2 * fresh if batch.scores == "random" else fresh)
    slot_map = batch.empty_slot_map(device)
    if filled:
        for row, (position, slot) in enumerate(zip(batch.positions, batch.slots, strict=True)):
            candidates = batch.policy.candidates(position + 1)
            best = top_tokens(steps[0][row].to(device), candidates, batch.policy.budget)
            slot_map[slot, 1:, :, : best.shape[-1]] = best.to(torch.int32)
        steps = steps[1:]
    assert_steps_agree(batch, device, slot_map, steps)
