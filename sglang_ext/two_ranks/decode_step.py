"""One decode step, top to bottom: plan, announce, forward, end.

    plan       decides what every request does, and brings the working-set table up to date
    announce   tells the cache rank which requests the step exchanges
    forward    is SGLang's; attention.py meets the exchange at the gate, layer group by layer group
    end        accounts for the step, ships chunks of prompts, and evicts what the cache rank has

With drafts, `begin_round` comes before the steps of a round: it ships what has been verified, and
notes what can be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang_ext.metrics import CacheRankMetrics
from sglang_ext.two_ranks.eviction import Eviction
from sglang_ext.two_ranks.exchange.base import Exchange, Gate
from sglang_ext.two_ranks.lifecycle import Phase, SparseSequence
from sglang_ext.two_ranks.recovery import CacheRankClient
from sglang_ext.two_ranks.shipping import Shipping
from sglang_ext.two_ranks.step_plan import AttendedRound, StepPlan, StepPlanner
from sglang_ext.two_ranks.tracing import Tracer

Result = TypeVar("Result")

CHUNKS_OF_A_ROUND = 4
"""So many chunks of a prompt are shipped before a round, which has as many steps or more."""


class DecodeStep:
    """Runs the decode steps of one inference rank.

    Attributes:
        running: the plan of the step being run, or None outside decode.
        round: with drafts, the requests for which the cache rank attends in this round; None if
            there are none.
        tracer: of its timeline; None if none is wanted.
    """

    def __init__(
        self,
        planner: StepPlanner,
        gate: Gate,
        cache_rank: CacheRankClient,
        shipping: Shipping,
        eviction: Eviction | None,
        metrics: CacheRankMetrics,
        tracer: Tracer | None,
    ) -> None:
        self.running: StepPlan | None = None
        self.round: AttendedRound | None = None
        self._planner = planner
        self._gate = gate
        self._cache_rank = cache_rank
        self._shipping = shipping
        self._eviction = eviction
        self._metrics = metrics
        self.tracer = tracer

    def begin_round(self, requests: list[Any], lengths: list[int], drafts: bool) -> bool:
        """Before the steps of a round; see `StepPlanner.begin_round`.

        What of a sparse request is evicted while the round is computed was verified before it.
        """
        self._cache_rank.follow_supervisor()
        exchange = self._cache_rank.exchange
        is_exchanged, attended = self._planner.begin_round(
            requests, lengths, exchange is not None, self._ship, drafts
        )
        if not any(sequence.orphaned for _, sequence in attended.rows):
            attended.exchange = exchange
        self.round = attended if attended.rows else None
        if self._eviction is not None:
            for (_, sequence), position in zip(attended.rows, attended.positions, strict=True):
                self._eviction.note(sequence, position)
        if not is_exchanged and self._planner.lifecycle.live:
            self._metrics.on_no_sparse_requests()
        return is_exchanged

    def _ship(self, sequences: Sequence[tuple[SparseSequence, int]]) -> None:
        together = []
        for sequence, tokens in sequences:
            if self._shipping.lacks_little(sequence, tokens):
                together.append((sequence, tokens))
                continue
            for _ in range(CHUNKS_OF_A_ROUND):
                self._shipping.advance(sequence, tokens)
            # The cache rank attends to what it has, if it attends; that is all of it.
            while sequence.phase is Phase.SPARSE and sequence.shipped < tokens:
                if self._cache_rank.exchange is None:
                    return
                self._shipping.advance(sequence, tokens)
        self._shipping.ship_rest(together)

    def run(
        self, requests: list[Any], lengths: list[int], forward: Callable[[], Result]
    ) -> tuple[Result, StepPlan]:
        """Run one step; returns what it computes, and its plan.

        Args:
            requests: SGLang's Req objects, in batch order.
            lengths: the length of each, the current token included.
            forward: computes the step, or on a GPU queues it.
        """
        plan = self.plan(requests, lengths)
        self.announce(plan)
        result = forward()
        self.end(plan)
        return result, plan

    def plan(self, requests: list[Any], lengths: list[int]) -> StepPlan:
        self._cache_rank.follow_supervisor()
        plan = self._planner.plan(requests, lengths, self._cache_rank.exchange is not None)
        plan.exchange = self._cache_rank.exchange
        self._planner.publish(plan, self._gate.awaited_step)
        self.running = plan
        return plan

    def announce(self, plan: StepPlan) -> None:
        traced = self.tracer is not None and self.tracer.wants(len(plan.sparse))
        self._cache_rank.call(lambda exchange: exchange.announce(plan.step, plan.rows, traced))

    def end(self, plan: StepPlan) -> None:
        """Account for the step, ship chunks of prompts, and note what can be evicted.

        On a GPU the forward pass has been queued, not computed.
        """
        self.running = None
        self._cache_rank.call(lambda exchange: exchange.finish_step())
        for row in plan.rows:
            row.sequence.exchanged += 1
            row.sequence.filled, row.sequence.fresh_filled = row.filled_after, row.fresh_filled
        for sequence in plan.sparse:
            sequence.statistics.sparse_steps += 1
        if (exchange := self._cache_rank.exchange) is None:
            return
        if plan.rows:
            self._account(exchange, plan)
        elif plan.shipping:
            self._metrics.on_no_sparse_requests()
        for sequence, length in plan.shipping:
            self._shipping.advance(sequence, length)
        is_up = self._cache_rank.exchange is not None
        if self._eviction is not None and is_up and self.round is None:
            for row in plan.rows:
                if row.sequence.phase is Phase.SPARSE:
                    self._eviction.note(row.sequence, row.position)

    def _account(self, exchange: Exchange, plan: StepPlan) -> None:
        if exchange.was_late:
            for row in plan.rows:
                row.sequence.statistics.late_steps += 1
        self._metrics.on_step(plan.step, exchange, len(plan.sparse))
        if self.tracer is not None:
            self.tracer.write_when_done(exchange)
