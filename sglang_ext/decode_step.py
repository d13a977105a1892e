"""The inference rank: table, lifecycle, exchange and supervisor put together, one step at a time.

A decode step runs top to bottom through `plan_step` and `announce_step`, the forward pass, which
meets the exchange at the gate, and `end_step`. Whatever goes wrong with the cache rank in
between ends in `_cache_rank_down`.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cache_rank.channels.control import ControlError
from cache_rank.channels.transport import TransportError
from cache_rank.config import ModelShape
from sglang_ext.covered import CoveredTokens, KeptTokens
from sglang_ext.exchange.base import Exchange, ExchangeCounters
from sglang_ext.exchange.host import HostExchange, HostGate
from sglang_ext.lifecycle import Phase, SparseSequence, prepare_requests
from sglang_ext.memory import kept_rows_a_request, reserve_block_rows
from sglang_ext.metrics import CacheRankMetrics
from sglang_ext.pools import Pools, first_reserve_row, model_shape, pools_of
from sglang_ext.server_args import CacheRankServerArgs
from sglang_ext.step_plan import StepPlan, StepPlanner
from sglang_ext.supervisor import CacheRankDownError, Place, Supervisor
from sglang_ext.tracing import Tracer

if TYPE_CHECKING:
    from sglang_ext.exchange.gate import DeviceGate

logger = logging.getLogger(__name__)


class InferenceRank:
    """What a scheduler process holds for its cache rank.

    Attributes:
        plan: of the decode step being run, or None outside decode.
        covered: tokens whose pool rows are to be freed.
        to_queue: requests that were retracted in this turn, and are queued in the next.
    """

    def __init__(
        self,
        args: CacheRankServerArgs,
        model: ModelShape,
        pools: Pools,
        tp_rank: int,
        supervisor: Supervisor,
    ) -> None:
        """Open the cache rank for a loaded model.

        Args:
            args: the server's arguments.
            model: shape of the sparse layers.
            pools: SGLang's, with the reserve behind them.
            tp_rank: of this process.
            supervisor: whose process has been spawned.

        Raises:
            CacheRankDownError: the cache rank did not start.
            ValueError: a flag does not suit the model.
        """
        self.args = args
        self.dense_layers = args.dense_layers
        self.inner_backend: str = args.attention_backend
        self.config = args.cache_rank_config(model, args.max_sparse_requests)
        self.plan: StepPlan | None = None
        self.device = pools.req_to_token.device
        """Of the model's tensors."""
        kept = None
        if rows_a_request := kept_rows_a_request(args):
            kept = KeptTokens(
                pools.keys[: args.dense_layers],
                pools.values[: args.dense_layers],
                first_reserve_row(pools, args),
                reserve_block_rows(args),
                args.max_sparse_requests,
                rows_a_request,
            )
        self.covered = CoveredTokens(
            pools.req_to_token, pools.allocator, self.config.recent_tokens, kept
        )
        self.metrics = CacheRankMetrics(args, self.config, tp_rank)
        self.retractions = 0

        self._planner = StepPlanner(
            args, self.config, pools, self.metrics, by_kernels=self.device.type == "cuda"
        )
        self.gate: DeviceGate | HostGate = HostGate(self.attempt)
        if (numbers := self._planner.numbers) is not None:
            from sglang_ext.exchange.gate import DeviceGate

            self.gate = DeviceGate(self.config, numbers["steps"], numbers["exchanged"])
        self.table, self.lifecycle = self._planner.table, self._planner.lifecycle
        self._working_sets = self._planner.working_sets
        self._req_to_token = pools.req_to_token
        self._allocator = pools.allocator
        self._orphans: list[SparseSequence] = []
        self.to_queue: list[Any] = []
        self._finished = ExchangeCounters()
        self._supervisor = supervisor
        supervisor.on_report = self.metrics.on_report
        self._exchange: Exchange | None = None
        self._tracer = Tracer(args.trace, args.trace_steps) if args.trace else None
        supervisor.open(self.config)
        self._connect()

    # One decode step, in order.

    def plan_step(self, requests: list[Any], lengths: list[int]) -> StepPlan:
        """Decide what every request of a decode step does, and bring the table up to date.

        Args:
            requests: SGLang's Req objects, in batch order.
            lengths: of each, the current token included.
        """
        self.follow_supervisor()
        plan = self._planner.plan(requests, lengths, self._exchange is not None)
        self._planner.advance(plan, self.gate.plan_step(bool(plan.rows)))
        self.plan = plan
        return plan

    def announce_step(self, plan: StepPlan) -> None:
        """Tell the cache rank which requests the step exchanges."""
        traced = self._tracer is not None and self._tracer.wants(len(plan.sparse))
        self.attempt(lambda exchange: exchange.begin_step(plan.rows, traced))

    def end_step(self, plan: StepPlan) -> None:
        """After the forward pass: account, ship prompts, free what the working set covers.

        On a GPU the forward pass has been queued, not computed.
        """
        self.plan = None
        self.attempt(lambda exchange: exchange.end_step())
        for sequence, filled in plan.unsettled:
            sequence.exchanged += 1
            sequence.filled = filled
        for sequence in plan.sparse:
            sequence.statistics.sparse_steps += 1
        self.lifecycle.note_measured(self.metrics.recall.take_requests())
        if self._exchange is None:
            return
        if plan.rows:
            self._account(self._exchange, plan)
        elif plan.shipping:
            self.metrics.on_no_sparse_requests()
        for sequence, length in plan.shipping:
            self._ship_chunk(sequence, length)
        if self._exchange is not None and self.args.inference_kv == "working-set":
            for sequence, position in zip(plan.rows.sequences, plan.rows.positions, strict=True):
                if sequence.phase is Phase.SPARSE:
                    self.covered.note(sequence, position)

    def _account(self, exchange: Exchange, plan: StepPlan) -> None:
        if exchange.was_late:
            for sequence in plan.rows.sequences:
                sequence.statistics.late_steps += 1
        self.metrics.on_step(exchange, len(plan.sparse))
        if self._tracer is not None:
            self._tracer.end_step(exchange)

    # Events of requests.

    def on_request_freed(self, request: Any) -> None:
        """SGLang takes back a request's slot: finish, abort, retraction, preemption."""
        self.table.forget(request.req_pool_idx)
        sequence = self.lifecycle.end(request.req_pool_idx)
        self._note_if_none_is_live()
        if sequence is not None and not sequence.orphaned:
            epoch = sequence.epoch
            self.attempt(lambda exchange: exchange.end([epoch]))

    def on_pool_cleared(self) -> None:
        """SGLang empties its pools."""
        for row in list(self.lifecycle.live):
            self.lifecycle.end(row)
        self._note_if_none_is_live()
        self.attempt(lambda exchange: exchange.flush())

    def _note_if_none_is_live(self) -> None:
        if not self.lifecycle.live:
            self.metrics.on_no_sparse_requests()

    def take_orphans(self) -> list[Any]:
        """Requests whose K and V are gone with a cache rank; SGLang must recompute them."""
        taken, self._orphans = self._orphans, []
        return [sequence.request for sequence in taken if not sequence.ended]

    def queue_later(self, request: Any) -> None:
        """A request has been retracted and waits for its turn to be queued."""
        request.cache_rank_statistics.retractions += 1
        self.retractions += 1
        self.metrics.on_retraction()
        self.to_queue.append(request)

    def take_requests_to_queue(self) -> list[Any]:
        """Requests that were retracted a turn ago."""
        taken, self.to_queue = self.to_queue, []
        return taken

    def statistics_of(self, requests: list[Any]) -> list[tuple[int | float | str | None, ...]]:
        """What the responses report so far, one entry a request; see RequestStatistics."""
        prepare_requests(requests)
        return [request.cache_rank_statistics.as_tuple() for request in requests]

    def state(self) -> dict[str, Any]:
        """For `/server_info`."""
        exchange, connection = self._exchange, self._supervisor.connection
        counters = dataclasses.asdict(self._finished)
        if exchange is not None:
            for name, value in dataclasses.asdict(exchange.counters).items():
                counters[name] += value
        return {
            "up": connection is not None,
            "pid": connection.pid if connection is not None else None,
            "starts": self._supervisor.starts,
            "start_seconds": self._supervisor.start_seconds,
            "capacity_tokens": self.lifecycle.capacity_tokens,
            "sparse_requests": sum(
                sequence.phase is Phase.SPARSE for sequence in self.lifecycle.live.values()
            ),
            "pool_free_tokens": self._allocator.available_size(),
            "retractions": self.retractions,
            **counters,
            **self.metrics.state(),
        }

    def close(self) -> None:
        """End the cache rank."""
        self._supervisor.close()

    # Inside a step.

    def _ship_chunk(self, sequence: SparseSequence, length: int) -> None:
        """Ship the next tokens of a request that has `length` in the pool."""
        stop = min(length, sequence.shipped + self.args.bulk_chunk_tokens)
        pool_rows = self._req_to_token[sequence.row, sequence.shipped : stop].to(torch.int64)
        self.attempt(lambda exchange: exchange.ship(sequence, pool_rows))

    # The cache rank comes and goes.

    def attempt(self, action: Callable[[Any], None]) -> None:
        """Do something with the cache rank, if it is up and stays up."""
        if self._exchange is None:
            return
        try:
            action(self._exchange)
        except (TransportError, ControlError, CacheRankDownError) as error:
            self._cache_rank_down(str(error))

    def follow_supervisor(self) -> None:
        """Let go of a cache rank that has ended, and connect to one that has been started."""
        connection = self._supervisor.connection
        if self._exchange is not None and connection is not self._exchange.connection:
            self._cache_rank_down("its process ended")
        if self._exchange is None and connection is not None:
            try:
                self._connect()
            except RuntimeError as error:  # decode goes on without it, and another is started
                self._supervisor.fail(connection, str(error))

    def _connect(self) -> None:
        connection = self._supervisor.connection
        if connection is None:
            return
        if isinstance(self.gate, HostGate):
            self._exchange = HostExchange(connection, self.config, self._working_sets)
        else:
            from sglang_ext.exchange.device import DeviceExchange

            self._exchange = DeviceExchange(connection, self.config, self._working_sets, self.gate)
        self.lifecycle.capacity_tokens = connection.capacity_tokens
        self.metrics.on_connect(self._exchange.counters)

    def _cache_rank_down(self, reason: str) -> None:
        """Go on without a cache rank: dense at once, or with what must be recomputed marked."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        self._supervisor.fail(exchange.connection, reason)
        exchange.close()
        for field in dataclasses.fields(ExchangeCounters):
            total = getattr(self._finished, field.name) + getattr(exchange.counters, field.name)
            setattr(self._finished, field.name, total)
        recompute = self.args.inference_kv == "working-set"
        for row, sequence in list(self.lifecycle.live.items()):
            is_sparse = sequence.phase is Phase.SPARSE
            sequence.statistics.stale_steps += is_sparse
            self.metrics.on_stale(is_sparse)
            sequence.request.cache_rank_losses += 1
            if recompute and is_sparse:
                sequence.orphaned = True
                sequence.request.cache_rank_failed = True
                self._orphans.append(sequence)
            else:
                self.lifecycle.end(row)
                self.table.forget(row)
        self._note_if_none_is_live()
        if self.plan is not None:
            self.plan.attends_to_everything = not recompute


_current: InferenceRank | None = None
_supervisor: Supervisor | None = None


def spawn(args: CacheRankServerArgs, tp_rank: int, gpu_id: int) -> None:
    """Spawn this scheduler's cache-rank process, so that it loads while the model does."""
    global _supervisor
    place = Place(
        args.cache_rank_address,
        trace=args.trace or "",
        memory_fraction=args.cache_rank_mem_fraction,
    )
    if args.device == "cuda":
        from cache_rank.channels.nccl import prepare_environment

        prepare_environment(os.environ, args.cache_rank_address)
        place = place._replace(
            inference_device=f"cuda:{gpu_id}",
            cache_device=f"cuda:{args.first_cache_rank_gpu + tp_rank}",
            transfer_backend=args.cache_rank_transfer_backend,
        )
    _supervisor = Supervisor(f"cache-rank-{tp_rank}", place, args.cache_rank_timeout)


def create(runner: Any, args: CacheRankServerArgs) -> InferenceRank:
    """Build this process's inference rank; the cache rank was spawned before."""
    global _current
    assert _supervisor is not None
    _current = InferenceRank(
        args, model_shape(runner, args), pools_of(runner, args), runner.ps.tp_rank, _supervisor
    )
    return _current


def current() -> InferenceRank | None:
    """This process's inference rank, or None when it has none."""
    return _current
