"""What every request of a decode step does, decided on the host before the forward pass.

A step has few numbers, for which lists cost the host less than arrays and tensors do: every kind
of tensor operation is code that the forward pass has pushed out of the caches. What the device
needs to know goes there by host memory that both see; one graph takes it and brings the table up to
date.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cache_rank.config import CacheRankConfig
from cache_rank.graphs import capture
from cache_rank.kernels.scatter import copy_tokens
from sglang_ext import reuse
from sglang_ext.compat import pool_state
from sglang_ext.memory import reserve_block_rows
from sglang_ext.metrics import CacheRankMetrics
from sglang_ext.payoff import Payoff
from sglang_ext.pools import Pools, first_reserve_row
from sglang_ext.request_state import asks_to_stay_dense, prepare_requests
from sglang_ext.server_args import CacheRankServerArgs
from sglang_ext.two_ranks.exchange.base import Exchange
from sglang_ext.two_ranks.exchange.pinned_ring import Field, HostToDeviceRing
from sglang_ext.two_ranks.exchange.slots import ExchangedRow, SlotBuffers, by_batch_row
from sglang_ext.two_ranks.lifecycle import Lifecycle, Phase, SparseSequence
from sglang_ext.two_ranks.shared_prompts import shared_prompts
from sglang_ext.two_ranks.working_set import Reserve, WorkingSetTable

GRAPH_PADDING = 256
"""A captured graph may be for this many more rows than there are request slots."""


@dataclasses.dataclass(slots=True)
class StepPlan:
    """What one decode step does.

    Attributes:
        step: its number, counted over all connections from 1; 0 when it exchanges nothing.
        attended_lengths: per batch row, tokens that layers over the working-set table attend to.
        lengths: the same on a GPU, (max batch,) int64, 1 beyond the batch.
        sources, targets: per batch row, see WorkingSetTable.places_of_current_token.
        shipping: requests whose prompt is being shipped, and their length.
        exchange: with the cache rank that was up when it was planned; None if none was.
    """

    step: int = 0
    attended_lengths: list[int] = dataclasses.field(default_factory=list)
    lengths: Tensor | None = None
    sources: list[int] = dataclasses.field(default_factory=list)
    targets: list[int] = dataclasses.field(default_factory=list)
    rows: list[ExchangedRow] = dataclasses.field(default_factory=list)
    sparse: list[SparseSequence] = dataclasses.field(default_factory=list)
    shipping: list[tuple[SparseSequence, int]] = dataclasses.field(default_factory=list)
    exchange: Exchange | None = None

    def stale_requests(self) -> list[SparseSequence]:
        """Those that went on without answers that they should have had, once it is computed."""
        if self.exchange is None:
            return []
        return self.exchange.stale_requests(self.step, self.sparse)


@dataclasses.dataclass(slots=True)
class AttendedRound:
    """The sparse requests of a round.

    Attributes:
        exchange: with the cache rank that was up when the round began; None if none was that has
            them.
        rows: their rows of the batch, with their sequences.
        positions: of their current tokens; the cache rank has all tokens before.
    """

    exchange: Exchange | None = None
    rows: list[tuple[int, SparseSequence]] = dataclasses.field(default_factory=list)
    positions: list[int] = dataclasses.field(default_factory=list)

    def stale_requests(self) -> list[SparseSequence]:
        """Those for which the cache rank may not have attended, once the round is computed."""
        is_lost = self.exchange is None or self.exchange.is_lost
        sequences = [sequence for _, sequence in self.rows if not sequence.ended]
        return [sequence for sequence in sequences if is_lost or sequence.orphaned]


def _step_numbers(table: WorkingSetTable) -> HostToDeviceRing:
    batch_at_most = table.table.shape[0] + GRAPH_PADDING
    return HostToDeviceRing(
        table.table.device,
        steps=Field(2, 0),
        exchanged=Field(batch_at_most, -1),
        lengths=Field(batch_at_most, 1),
        sources=Field(batch_at_most, 0),
        targets=Field(batch_at_most, table.nowhere),
    )


class StepPlanner:
    """Plans the decode steps of one inference rank.

    Attributes:
        lifecycle: the sequences, which move on as their steps are planned.
        slots: where its sparse rows point to.
        numbers: what the kernels of a step read, if they bring the table up to date: `steps`, the
            `awaited_step` of the gate and the step's own number, `exchanged` as by_batch_row, and
            `lengths`, `sources` and `targets` as in StepPlan.
        steps: how many steps have exchanged something.
        payoff: tells where sparse requests make steps shorter; None where that is not known.
        sparse_anyway_from: the length from which requests are sparse even if it does not.
    """

    def __init__(
        self,
        args: CacheRankServerArgs,
        config: CacheRankConfig,
        pools: Pools,
        metrics: CacheRankMetrics,
        by_kernels: bool,
    ) -> None:
        """Begin with no sequence.

        Args:
            by_kernels: whether kernels bring the table up to date; else the host does, in whose
                memory it is.
        """
        self.steps = 0
        self.payoff: Payoff | None = None
        self.sparse_anyway_from = args.sparse_anyway_from
        self.table = WorkingSetTable(pools.req_to_token, config)
        self.slots = SlotBuffers(
            config, pools.keys[args.dense_layers :], pools.values[args.dense_layers :]
        )
        self.lifecycle = Lifecycle(
            config,
            Reserve(
                first_reserve_row(pools, args),
                reserve_block_rows(args),
                args.max_sparse_requests,
            ),
            args.sparse_from,
            pools.req_to_token.shape[1],
            shared_prompts(args, config),
        )
        self.numbers = _step_numbers(self.table) if by_kernels else None
        self._config = config
        self._evicts = args.inference_kv == "working-set"
        self._least_sparse_length = args.sparse_from
        self._metrics = metrics
        self._req_to_token = pools.req_to_token
        self._graph: torch.cuda.CUDAGraph | None = None
        if self.numbers is not None:
            self.numbers.write()
            self._take_numbers()  # graphs of the forward pass are captured over the fillers
            if pools.req_to_token.is_cuda:
                self._graph = capture(self._take_numbers)

    def begin_round(
        self,
        requests: Sequence[Any],
        lengths: Sequence[int],
        is_up: bool,
        ship: Callable[[Sequence[tuple[SparseSequence, int]]], None],
        drafts: bool,
    ) -> tuple[bool, AttendedRound]:
        """Before the steps of a round of drafts, or dense ones: bring sequences up to its start.

        Those of which the cache rank has all but the current token are exchanged in the round. All
        others are dense, but for sparse ones whose tokens leave the pool. Those are shipped in any
        round, because the cache rank attends for them.

        Args:
            lengths: of each, the current token included; those before it are verified.
            ship: ships what is verified of sequences that have so many tokens.
            drafts: whether the round drafts; else none is exchanged, and none begins.

        Returns:
            Whether some are exchanged, and for which the cache rank attends.
        """
        prepare_requests(requests)
        attended = AttendedRound()
        sequences: list[tuple[int, SparseSequence, int]] = []
        for index, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            sequence = self.lifecycle.live.get(pool_state(request).req_pool_idx)
            if sequence is None:
                least = self.sparse_anyway_from
                sequence = self._begin(request, length, is_up, least, ships=drafts)
            if sequence is not None:
                sequences.append((index, sequence, length - 1))
        if is_up:
            ship(
                [
                    (sequence, position)
                    for _, sequence, position in sequences
                    if (drafts or self._stays_sparse(sequence)) and not sequence.orphaned
                ]
            )
        exchanged, sparse = False, []
        for index, sequence, position in sequences:
            if sequence.ended:  # the cache rank was lost just now, or has no room
                continue
            is_complete = drafts and sequence.shipped == position
            if not is_complete and not self._stays_sparse(sequence):
                self._park(sequence)
                continue
            if not sequence.orphaned:
                exchanged = True
                self._move_on(sequence, position)
            if sequence.phase is Phase.SPARSE:
                sparse.append((sequence.row, position))
            if self._stays_sparse(sequence):
                attended.rows.append((index, sequence))
                attended.positions.append(position)
        if sparse:
            self.table.begin_round(*zip(*sparse, strict=True))
        return exchanged, attended

    def _stays_sparse(self, sequence: SparseSequence) -> bool:
        """Whether a sequence cannot attend to everything in the pool any more."""
        return self._evicts and sequence.phase is Phase.SPARSE

    def _park(self, sequence: SparseSequence) -> None:
        """Let a sequence attend to everything, and stay out of the exchange, until it moves on."""
        if sequence.phase is not Phase.SHIPPING:
            sequence.phase = Phase.SHIPPING
            sequence.statistics.dense_reason = "shipping"
            self.table.forget(sequence.row)

    def begin_arriving(
        self, request: Any, length: int, running: Sequence[Any], is_up: bool
    ) -> None:
        """Begin a sequence for a request whose prompt comes from another server, if it may.

        It takes no room that a running request may want. If there is none, it begins in a step.

        Args:
            length: in its first step, the current token included.
        """
        prepare_requests([request, *running])
        pays_from = self._pays_from([request], [length])
        if self.lifecycle.reason_to_stay_dense(request, length, is_up, pays_from) is not None:
            return
        if not self.lifecycle.may_be_short_of_room(running):
            self.lifecycle.begin(request, length)

    def plan(self, requests: Sequence[Any], lengths: Sequence[int], is_up: bool) -> StepPlan:
        """Decide what every request of a decode step does, see `DecodeStep.run`."""
        prepare_requests(requests)
        live, table, budget = self.lifecycle.live, self.table, self._config.sparse_budget
        drafts = self._config.draft_steps > 0
        shipping, sparse = Phase.SHIPPING, Phase.SPARSE  # slow to look up in every row
        pays_from = self._pays_from(requests, lengths)
        plan = StepPlan()
        for index, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            slot, position, is_sparse = pool_state(request).req_pool_idx, length - 1, False
            sequence = live.get(slot)
            if sequence is None and not drafts:
                sequence = self._begin(request, length, is_up, pays_from)
            if sequence is not None:
                if sequence.phase is not sparse and is_up and not drafts:
                    self._move_on(sequence, position)
                phase, filled = sequence.phase, sequence.filled
                is_sparse = phase is sparse
                if is_sparse:
                    plan.sparse.append(sequence)
                    length = table.sparse_length(filled)
                    if drafts:
                        length += position - sequence.shipped
                    sequence.statistics.attended_tokens = length
                elif phase is shipping and not drafts:
                    plan.shipping.append((sequence, length))
                if phase is not shipping and not sequence.orphaned:
                    fresh = filled
                    if not is_sparse or filled != budget:  # else all slots stay in use
                        newest, before = position, position - 1
                        if drafts:
                            newest = before = sequence.shipped - 1
                        filled = self._config.filled_after(newest, filled)
                        fresh = self._config.filled_after(before, sequence.fresh_filled)
                    plan.rows.append(ExchangedRow(sequence, index, position, filled, fresh))
            plan.attended_lengths.append(length)
            source, target = table.places_of_current_token(slot, position, is_sparse)
            plan.sources.append(source)
            plan.targets.append(target)
        if plan.rows:
            self.steps += 1
            plan.step = self.steps
        return plan

    def publish(self, plan: StepPlan, awaited_step: int) -> None:
        """Bring the table up to date, and to the device what the step's kernels read.

        Args:
            awaited_step: see Gate.
        """
        numbers = self.numbers
        if numbers is None:
            places = torch.tensor((plan.sources, plan.targets), dtype=torch.int64)
            self.table.add(*places)
            return
        numbers.write(
            steps=(awaited_step, plan.step),
            exchanged=by_batch_row(plan.rows, len(plan.attended_lengths)),
            lengths=plan.attended_lengths,
            sources=plan.sources,
            targets=plan.targets,
        )
        if self._graph is None:
            self._take_numbers()
        else:
            self._graph.replay()
        plan.lengths = numbers["lengths"]

    def _take_numbers(self) -> None:
        """Take the step's numbers, and bring the table up to date."""
        assert self.numbers is not None
        self.numbers.collect()
        self.table.add(self.numbers["sources"], self.numbers["targets"])

    def attended(self, length: int) -> int:
        """Tokens that a sparse request of a length attends to."""
        return self.table.sparse_length(self._config.slots_wanted_after(length - 2))

    def _pays_from(self, requests: Sequence[Any], lengths: Sequence[int]) -> int:
        """The length from which the requests of a step may turn sparse.

        They do together, if that makes steps like this one shorter. Beside sparse requests it does:
        steps are exchanged already. Once a request is sparse, it stays so.
        """
        if self.payoff is None:
            return self.sparse_anyway_from
        least, live = self._least_sparse_length, self.lifecycle.live
        if live and any(pool_state(request).req_pool_idx in live for request in requests):
            return least
        pairs = zip(requests, lengths, strict=True)
        long_ones = [
            length
            for request, length in pairs
            if length >= least and not asks_to_stay_dense(request)
        ]
        tokens, scored = sum(lengths), sum(long_ones)
        attended = tokens - scored + sum(map(self.attended, long_ones))
        if long_ones and self.payoff.is_shorter(tokens, scored, attended):
            return least
        return self.sparse_anyway_from

    def _begin(
        self, request: Any, length: int, is_up: bool, pays_from: int, ships: bool = True
    ) -> SparseSequence | None:
        """Begin a sequence, unless there is a reason against it.

        One that begins must be shipped before others begin: the cache rank takes them in order.
        """
        reason = self.lifecycle.reason_to_stay_dense(request, length, is_up, pays_from)
        if reason is None:
            return self.lifecycle.begin(request, length) if ships else None
        statistics = request.cache_rank_statistics
        if statistics.dense_reason != reason:
            statistics.dense_reason = reason
            if reason not in ("below_threshold", "not_shorter"):
                self._metrics.series.count_dense(request, reason)
        return None

    def _move_on(self, sequence: SparseSequence, position: int) -> None:
        """Move a sequence on; from where it turns sparse it attends to its working set."""
        if self.lifecycle.move_on(sequence, position):
            self.table.enter(sequence.row, position, sequence.block)
            if self._evicts or not self._config.draft_steps:  # else all is verified in the pool
                reuse.note_sparse(sequence.request, position)
            self._copy_sinks(sequence)

    def _copy_sinks(self, sequence: SparseSequence) -> None:
        """Copy a request's first tokens into its reserve block."""
        sinks = self._config.sink_tokens
        if sinks:
            source = self._req_to_token[sequence.row, :sinks].to(torch.int64)
            target = torch.arange(sequence.block, sequence.block + sinks, device=source.device)
            copy_tokens(self.slots.keys, self.slots.values, source, target)
