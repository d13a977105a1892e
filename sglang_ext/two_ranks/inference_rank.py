"""The inference rank: what a scheduler process holds for its cache rank, built from its parts."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.protocol import End, Flush, KeyBasis, QueryProjection
from cache_rank.residency import FORMATS, same_codes, shared_tail
from sglang_ext import compat, reuse
from sglang_ext.drafts.number import DraftNumber
from sglang_ext.ineffective_flags import warn_small_capacity
from sglang_ext.memory import coded_tokens
from sglang_ext.metrics import CacheRankMetrics
from sglang_ext.pools import Pools, model_shape, pools_of
from sglang_ext.projections import watch_inputs
from sglang_ext.server_args import CacheRankServerArgs
from sglang_ext.two_ranks.decode_step import DecodeStep
from sglang_ext.two_ranks.eviction import Eviction
from sglang_ext.two_ranks.exchange import make_exchange, make_gate
from sglang_ext.two_ranks.exchange.base import Exchange
from sglang_ext.two_ranks.exchange.connection import Connection, ProcessSettings
from sglang_ext.two_ranks.first_layer import FirstLayer
from sglang_ext.two_ranks.lifecycle import Phase
from sglang_ext.two_ranks.recovery import CacheRankClient
from sglang_ext.two_ranks.restoring import Restoring
from sglang_ext.two_ranks.selection_weights import SelectionWeights
from sglang_ext.two_ranks.shipping import Shipping
from sglang_ext.two_ranks.step_plan import AttendedRound, StepPlanner
from sglang_ext.two_ranks.supervisor import Supervisor
from sglang_ext.two_ranks.tracing import Tracer
from sglang_ext.two_ranks.verifying import VerifyingBackend

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class InferenceRank:
    """Builds the parts of a decode step, and passes on SGLang's events.

    Attributes:
        planner: decides what requests do in a step.
        eviction: of tokens from the pool; None when every token stays there.
        drafts: how many a round has; None where sparse steps answer.
        restoring: of prompts into the pool; None where they cannot be, or would not be exact and
            the radix cache takes only what is.
    """

    def __init__(
        self,
        args: CacheRankServerArgs,
        model: ModelShape,
        pools: Pools,
        tp_rank: int,
        supervisor: Supervisor,
        selection_weights: SelectionWeights | None,
    ) -> None:
        """Open the cache rank, whose process has been spawned, for a loaded model.

        Raises:
            CacheRankDownError: the cache rank did not start.
            ValueError: a flag does not suit the model.
        """
        self.args = args
        self.config = args.cache_rank_config(model, args.max_sparse_requests)
        self.device = pools.req_to_token.device
        self._coded_tokens = coded_tokens(args, self.config)
        self.metrics = CacheRankMetrics(args, tp_rank)
        self._selection_weights = selection_weights
        self._weights_have_changed = False
        # How long steps take is not measured: rounds have all drafts.
        steps = self.config.draft_steps
        self.drafts = DraftNumber(steps, None) if steps else None
        if selection_weights is not None and selection_weights.forecasts:
            first_ones = [selection_weights.layers[group.start] for group in self.config.groups]
            watch_inputs(first_ones, self._on_input)
        self.planner = planner = StepPlanner(
            args, self.config, pools, self.metrics, by_kernels=self.device.type == "cuda"
        )
        self.table, self.lifecycle = planner.table, planner.lifecycle
        self.gate = make_gate(self.config, planner.numbers)
        evicts = args.inference_kv == "working-set"
        self.eviction = Eviction(args, pools) if evicts else None
        self.restoring: Restoring | None = None
        self._verifying: VerifyingBackend | None = None
        self._allocator = pools.allocator
        self._supervisor = supervisor
        tracer = Tracer(args.trace, args.trace_steps) if args.trace else None

        supervisor.on_report = self.metrics.on_report
        supervisor.on_loss = self.metrics.on_loss
        connection = supervisor.open(self.config)
        warn_small_capacity(connection.capacity_tokens, pools.req_to_token.shape[1])
        self.cache_rank = CacheRankClient(
            supervisor,
            self._begin_exchange,
            self.lifecycle,
            self.table,
            self.metrics,
            recomputes=evicts,
            drafts=self.drafts is not None and not evicts,
        )
        self._shipping = Shipping(
            self.cache_rank,
            self.lifecycle,
            pools.req_to_token,
            args.bulk_chunk_tokens,
            self._coded_tokens,
            shared_tail(self.config),
        )
        self.decode_step = DecodeStep(
            planner,
            self.gate,
            self.cache_rank,
            self._shipping,
            self.eviction,
            self.metrics,
            tracer,
        )

    def restore_prompts(self, model: torch.nn.Module, pools: Pools) -> None:
        """Restore prompts from now on, where they can be.

        SGLang's radix cache takes what was computed densely, which inexact tokens were not.
        """
        if self.lifecycle.prompts is None or self.args.only_decodes:
            return
        is_exact = FORMATS[self.config.kv_residency].lossless
        may_be_inexact = self.eviction is not None or self.args.reuse_sparse_tokens == "on"
        if not (is_exact or may_be_inexact):
            return
        if self.args.enable_return_routed_experts or self.args.kv_canary != "none":
            logger.info("cache rank: prompts are not restored: forward passes note their tokens")
            return
        if self.args.dense_layers > 1:
            logger.info("cache rank: prompts are not restored: --dense-layers is more than 1")
            return
        first_layer = None
        if self.args.dense_layers:
            try:
                first_layer = FirstLayer(model, pools.keys[0], pools.values[0])
            except ValueError as error:
                logger.info("cache rank: prompts are not restored: %s", error)
                return
        self.restoring = Restoring(
            self.cache_rank, self.lifecycle, self._allocator, first_layer, is_exact
        )
        self.cache_rank.call(lambda exchange: exchange.prepare_restore())

    def _begin_exchange(self, connection: Connection) -> Exchange:
        slots, counters = self.planner.slots, self.metrics.counters
        tokens = self.args.bulk_chunk_tokens, self._coded_tokens
        exchange = make_exchange(connection, self.config, slots, counters, self.gate, *tokens)
        if self._selection_weights is not None and self._selection_weights.sketches:
            for layer in range(self.config.model.layers):
                basis = self._selection_weights.basis(layer, self.device)
                exchange.send_of_layer(KeyBasis(layer), basis)
        self._project(exchange)
        if self.restoring is not None:
            exchange.prepare_restore()
        return exchange

    def _project(self, exchange: Exchange) -> None:
        """Send by what queries are forecast."""
        if self._selection_weights is None or not self._selection_weights.forecasts:
            return
        for layer in range(self.config.model.layers):
            projection = self._selection_weights.projection(layer, self.config.model.torch_dtype)
            if projection is not None:
                exchange.send_of_layer(QueryProjection(layer), projection)

    def _on_input(self, group: int, hidden: Tensor, residual: Tensor | None, batch: Any) -> None:
        is_exchanged = self._verifying is None or not self._verifying.is_running
        if not batch.forward_mode.is_decode() or not is_exchanged:
            return
        if self.device.type == "cuda" or self.decode_step.running is not None:
            self.gate.stage_hidden(group, hidden, residual)

    # Steps.

    def run_other(self, requests: list[Any], forward: Callable[[], Result]) -> Result:
        if self.restoring is not None and self.device.type == "cuda":
            self.restoring.forward_stream = torch.cuda.current_stream()
        return forward()

    def run_decode(
        self, requests: list[Any], lengths: list[int], forward: Callable[[], Result]
    ) -> Result:
        """Run a decode step, and leave its plan with what it computes.

        With drafts it is one that does not draft, and there is nothing of it to be taken back.
        """
        if self.drafts is not None:
            self.decode_step.begin_round(requests, lengths, drafts=False)
            if self.round is not None:
                return self._attend(self.round, 1, forward)
        result, plan = self.decode_step.run(requests, lengths, forward)
        if self.drafts is None:
            result.cache_rank_plan = plan  # type: ignore[attr-defined]
        return result

    # Drafts; `InlineRank` has the same methods.

    def draft_backend(self, runner: Any) -> Any:
        """The attention backend of decode steps; the runner's own verifies, too.

        Where tokens leave the pool, another one verifies for some.
        """
        if self.eviction is not None:
            model = self.config.model
            self._verifying = VerifyingBackend(runner, self.args, model, self.cache_rank)
        return runner.attn_backend.decode_backend

    def plan_drafts(self, requests: list[Any], lengths: list[int]) -> int:
        """Begin a round, and decide how many drafts it has."""
        assert self.drafts is not None
        is_exchanged = self.decode_step.begin_round(requests, lengths, drafts=True)
        return self.drafts.most if is_exchanged else 0

    def run_draft(
        self, requests: list[Any], lengths: list[int], forward: Callable[[], Result]
    ) -> Result:
        return self.decode_step.run(requests, lengths, forward)[0]

    run_dense = run_draft

    @property
    def round(self) -> AttendedRound | None:
        """What the last round attends to on the cache rank, if anything."""
        return self.decode_step.round

    def run_verification(self, forward: Callable[..., Result]) -> Result:
        """Verify a round's tokens, by `Forwards.verify`; those of some by the cache rank."""
        if self.round is None:
            return forward()
        eagerly = functools.partial(forward, in_graph=False)
        return self._attend(self.round, self.config.verified_tokens, eagerly)

    def _attend(self, of_round: AttendedRound, width: int, forward: Callable[[], Result]) -> Result:
        assert self._verifying is not None
        return self._verifying.run(of_round, width, forward)

    # Events of the model.

    def on_weights_updated(self) -> None:
        """Send by what queries are forecast before the next step; updates come in many parts."""
        self._weights_have_changed = self._selection_weights is not None
        self.lifecycle.weight_updates += 1
        self._shipping.drop_unused(everything=True)

    # Events of requests.

    def before_match(self, request: Any) -> None:
        """Let a request find what the weights of today have computed, if it has nothing yet."""
        sparse_tokens = self.args.reuse_sparse_tokens == "on"
        reuse.set_namespace(request, sparse_tokens, self.lifecycle.weight_updates)

    def takes(self, codes: CacheRankConfig) -> bool:
        """Whether pages that come in these codes can go on to the cache rank as they are."""
        return self._coded_tokens > 0 and same_codes(codes, self.config)

    def on_prompt_arriving(self, request: Any, tokens: int, running: Sequence[Any]) -> None:
        """Begin the sequence of a request whose prompt, of so many tokens, begins to come."""
        is_up = self.cache_rank.exchange is not None
        self.planner.begin_arriving(request, tokens + 1, running, is_up)

    def on_page_arrived(
        self, request: Any, pool_rows: Tensor, page: Sequence[Tensor] | None
    ) -> None:
        """Ship what has come of a prompt while the rest is coming, see `Shipping.ship_arrived`."""
        row = compat.pool_state(request).req_pool_idx
        if (sequence := self.lifecycle.live.get(row)) is not None:
            self._shipping.ship_arrived(sequence, pool_rows, page)

    def on_prefilled(self, requests: list[Any]) -> None:
        """Read the rows of prompts anew in the next step.

        Of tokens that the radix cache had already, it has freed these requests' rows, and put its
        own in SGLang's table, while the first decode step was under way.
        """
        if self.args.disable_radix_cache:
            return
        for request in requests:
            if (row := compat.pool_state(request).req_pool_idx) is not None:
                self.table.forget(row)

    def on_request_freed(self, request: Any) -> None:
        """End the sequence of a request whose slot SGLang takes back."""
        if not self.args.only_decodes:  # else it comes back as it is
            reuse.forget(request)
        row = compat.pool_state(request).req_pool_idx
        self.table.forget(row)
        sequence = self.lifecycle.end(row)
        self._note_if_none_is_sparse()
        if sequence is not None and not sequence.orphaned:
            self.cache_rank.tell(End([sequence.sequence_id]))

    def on_pool_cleared(self) -> None:
        """End all sequences, because SGLang empties its pools."""
        for row in list(self.lifecycle.live):
            self.lifecycle.end(row)
        self.lifecycle.forget_shared()
        self._note_if_none_is_sparse()
        self.cache_rank.tell(Flush())

    def _note_if_none_is_sparse(self) -> None:
        if not self.lifecycle.some_are_sparse:
            self.metrics.on_no_sparse_requests()

    # Between steps.

    def before_next_batch(self, scheduler: Any, running_batch: Any) -> None:
        """Evict tokens, and give requests whose K and V are lost back to SGLang's queue."""
        if self._weights_have_changed and self.lifecycle.live:
            self._weights_have_changed = False
            self.cache_rank.call(self._project)
        if not self.lifecycle.live or running_batch.is_empty():
            # Decode steps do this, and none may follow soon: a lost cache rank keeps its memory.
            self.cache_rank.follow_supervisor()
        if self.eviction is not None and self.eviction.evict():
            running_batch.batch_is_full = False  # SGLang looks again only when a request ends
        self.cache_rank.queue_retracted(scheduler)
        self.cache_rank.retract_orphans(scheduler, running_batch)

    # What users see.

    def state(self, tree_cache: Any) -> dict[str, Any]:
        """Return what `/server_info` shows; what SGLang's tree can give up counts as free."""
        connection, last_loss = self._supervisor.connection, self._supervisor.last_loss
        return {
            "up": connection is not None,
            "pid": connection.process.pid if connection is not None else None,
            "memory_released": self._supervisor.is_released,
            "starts": self._supervisor.starts,
            "start_seconds": self._supervisor.start_seconds,
            "losses": self._supervisor.losses,
            "failed_starts": self._supervisor.failed_starts,
            "last_loss": last_loss.line() if last_loss is not None else None,
            "restart_delay_seconds": last_loss.restart_delay_seconds if last_loss else 0.0,
            "capacity_tokens": self.lifecycle.capacity_tokens,
            "sparse_requests": sum(
                sequence.phase is Phase.SPARSE for sequence in self.lifecycle.live.values()
            ),
            "pool_free_tokens": self._allocator.available_size() + tree_cache.evictable_size(),
            "sparse_budget": str(self.config.budget_curve),
            "retractions": self.cache_rank.retractions,
            "drafts": self.drafts and self.drafts.state(),
            "steps": self.planner.steps,
            "seconds_of_steps": self.planner.payoff and self.planner.payoff._asdict(),
            **self.metrics.state(),
        }


_current: InferenceRank | None = None
_supervisor: Supervisor | None = None


def spawn(args: CacheRankServerArgs, tp_rank: int, gpu_id: int) -> None:
    """Spawn this scheduler's cache-rank process, so that it loads while the model does."""
    global _supervisor
    settings = ProcessSettings(
        args.cache_rank_address,
        trace=args.trace or "",
        memory_fraction=args.cache_rank_mem_fraction,
        host_bytes=int(args.cache_rank_host_gb * 1e9),
    )
    if args.device == "cuda":
        from cache_rank.channels.nccl import prepare_environment

        prepare_environment(os.environ, args.cache_rank_address)
        settings = settings._replace(
            inference_device=f"cuda:{gpu_id}",
            cache_device=f"cuda:{args.first_cache_rank_gpu + tp_rank}",
            transfer_backend=args.cache_rank_transfer_backend,
        )
    _supervisor = Supervisor(
        f"cache-rank-{tp_rank}",
        settings,
        args.cache_rank_timeout,
        args.cache_rank_max_restart_delay,
    )


def create(runner: Any, args: CacheRankServerArgs) -> InferenceRank:
    """Build this process's inference rank, whose cache rank has been spawned."""
    global _current
    assert _supervisor is not None
    forecasts = args.query_predictor == "forecast"
    is_told = forecasts or args.score_keys == "sketch"
    weights = SelectionWeights(runner.model, args) if is_told else None
    pools = pools_of(runner, args)
    _current = InferenceRank(
        args,
        model_shape(runner, args.dense_layers, forecasts),
        pools,
        get_parallel().tp_rank,
        _supervisor,
        weights,
    )
    _current.restore_prompts(runner.model, pools)
    return _current


def current() -> InferenceRank | None:
    """Return this process's inference rank, or None when it has none."""
    return _current
