"""What requests do in a round of drafts, and which pool rows its steps attend to."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from test_step_plan import CONTEXT, planner_of, request_on

from sglang_ext import reuse
from sglang_ext.two_ranks.lifecycle import Phase, SparseSequence
from sglang_ext.two_ranks.step_plan import AttendedRound, StepPlanner

DRAFTS, PHASE = 4, {Phase.SHIPPING: "shipping", Phase.WARMING: "warming", Phase.SPARSE: "sparse"}


class Rounds:
    """A planner of requests whose cache rank takes so many tokens of each before a round."""

    def __init__(
        self, chunk: int = CONTEXT, by_kernels: bool = False, inference_kv: str = "full"
    ) -> None:
        self.planner = planner_of(by_kernels, inference_kv=inference_kv, draft_steps=DRAFTS)
        self.planner.lifecycle.prompts = None  # these requests have no tokens that could be shared
        self.chunk, self.steps = chunk, 0
        self.attended = AttendedRound()

    def ship(self, sequences: Sequence[tuple[SparseSequence, int]]) -> None:
        for sequence, tokens in sequences:
            sequence.shipped = min(tokens, sequence.shipped + self.chunk)

    def begin(self, request: Any, length: int, is_up: bool = True, drafts: bool = True) -> bool:
        is_exchanged, self.attended = self.planner.begin_round(
            [request], [length], is_up, self.ship, drafts
        )
        return is_exchanged

    def step(self, request: Any, length: int) -> str:
        """One step: what it attends to is checked; its request's phase."""
        table, sequence = self.planner.table, self.planner.lifecycle.live[request.req_pool_idx]
        plan = self.planner.plan([request], [length], True)
        self.planner.publish(plan, 0)
        (attended,) = plan.attended_lengths
        slot = request.req_pool_idx
        rows = table.table[slot, :attended].tolist()
        true = [slot * CONTEXT + token for token in range(length)]
        if sequence.phase is Phase.SPARSE:
            newest = true[sequence.shipped - 3 :]  # three recent ones, all since, and the current
            assert rows == [*range(sequence.block, sequence.block + 7), *newest]
        else:
            assert rows == true
        assert bool(plan.rows) == (sequence.phase is not Phase.SHIPPING)
        assert plan.shipping == []
        for row in plan.rows:
            sequence.exchanged += 1
            sequence.filled, sequence.fresh_filled = row.filled_after, row.fresh_filled
        return PHASE[sequence.phase]


@pytest.mark.parametrize("by_kernels", [False, True])
def test_drafts_attend_to_what_is_verified_and_to_those_before_them(by_kernels: bool) -> None:
    """Drafts are wrong, or all right; then one token more is verified than steps have seen."""
    rounds, request, length, phases = Rounds(chunk=10, by_kernels=by_kernels), request_on(4), 14, []
    for right in (1, 0, DRAFTS, 2, 0, DRAFTS, 1):
        assert rounds.begin(request, length) == (length - 1 <= rounds.chunk * (1 + len(phases)))
        phases.append({rounds.step(request, length + draft) for draft in range(DRAFTS)})
        length += 1 + right
    assert phases == [{"shipping"}, {"warming"}, *[{"sparse"}] * 5]
    assert reuse.dense_tokens(request) is None


def test_dense_steps_in_between_attend_to_everything() -> None:
    rounds, request, length = Rounds(), request_on(4), 14
    phases = []
    for drafts in (True, True, False, True, False, True):
        assert rounds.begin(request, length, drafts=drafts) == drafts
        phases += {rounds.step(request, length + step) for step in range(DRAFTS)}
        length += DRAFTS
    assert phases == ["warming", "sparse", "shipping", "sparse", "shipping", "sparse"]


def test_a_round_without_a_cache_rank_is_dense() -> None:
    rounds, request = Rounds(), request_on(4)
    assert not rounds.begin(request, 14, is_up=False)
    assert request.cache_rank_statistics.dense_reason == "down"
    assert rounds.planner.lifecycle.live == {}
    plan = rounds.planner.plan([request], [14], True)  # one that is back waits for the next round
    assert plan.attended_lengths == [14]
    assert rounds.planner.lifecycle.live == {}


def test_a_rank_that_is_lost_while_a_round_begins_leaves_it_dense() -> None:
    rounds, request = Rounds(), request_on(4)
    rounds.begin(request, 14)
    planner: StepPlanner = rounds.planner

    def lose(sequences: Any) -> None:
        for row in list(planner.lifecycle.live):
            planner.lifecycle.end(row)
            planner.table.forget(row)

    others = [request, request_on(2)]
    is_exchanged, _ = planner.begin_round(others, [16, 20], True, lose, True)
    assert not is_exchanged
    assert planner.lifecycle.live == {}  # what began then would reach the next one out of order
    plan = planner.plan(others, [16, 20], True)
    assert plan.attended_lengths == [16, 20]
    assert not plan.rows


def test_a_sequence_begins_when_it_is_shipped() -> None:
    """The cache rank takes sequences in the order of their numbers."""
    rounds, early, late = Rounds(), request_on(1), request_on(2)
    shipped: list[int] = []

    def ship(sequences: Sequence[tuple[SparseSequence, int]]) -> None:
        shipped.extend(sequence.sequence_id for sequence, _ in sequences)

    begin = rounds.planner.begin_round
    is_exchanged, _ = begin([late, early], [3, 14], True, ship, False)
    assert not is_exchanged
    assert shipped == []
    assert early.cache_rank_statistics.dense_reason == "prefill"
    assert late.cache_rank_statistics.dense_reason == "below_threshold"
    begin([late, early], [15, 16], True, ship, True)
    assert shipped == [1, 2]


def test_a_sparse_request_whose_tokens_leave_the_pool_stays_sparse() -> None:
    """It is attended to in every round, for which it is shipped; also where none drafts."""
    rounds, request, length = Rounds(inference_kv="working-set"), request_on(4), 14
    attended = []
    for drafts in (True, True, False, True, False, True):
        rounds.begin(request, length, drafts=drafts)
        (sequence,) = rounds.planner.lifecycle.live.values()
        attended.append(rounds.attended.positions)
        if attended[-1]:
            assert rounds.attended.rows == [(0, sequence)]
            assert sequence.shipped == length - 1
        if drafts:
            for step in range(DRAFTS):
                rounds.step(request, length + step)
        length += DRAFTS if drafts else 1
    assert attended == [[], [17], [21], [22], [26], [27]]
    assert reuse.dense_tokens(request) == 17  # the rest is no more exact than what is held


def test_a_request_whose_cache_rank_is_lost_is_attended_to_by_nobody() -> None:
    """It is neither exchanged nor dense: its tokens are not in the pool. And it is stale once."""
    rounds, request = Rounds(inference_kv="working-set"), request_on(4)
    for length in (14, 18):
        rounds.begin(request, length)
        for step in range(DRAFTS):
            phase = rounds.step(request, length + step)
    assert phase == "sparse"
    (sequence,) = rounds.planner.lifecycle.live.values()
    before, exchange = rounds.attended, SimpleNamespace(is_lost=False)
    before.exchange = exchange
    assert before.stale_requests() == []
    exchange.is_lost = True
    assert before.stale_requests() == [sequence]
    sequence.orphaned = True
    assert not rounds.begin(request, 22, is_up=False)
    assert rounds.attended.stale_requests() == [sequence]
    plan = rounds.planner.plan([request], [22], False)
    assert plan.rows == []
    assert plan.attended_lengths[0] < 22
    rounds.planner.lifecycle.end(sequence.row)
    assert before.stale_requests() == rounds.attended.stale_requests() == []
