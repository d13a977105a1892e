"""The cache rank is lost and comes back: what is let go, and which requests SGLang recomputes.

With `--inference-kv full` requests go on dense at once. With `working-set` the K and V of sparse
requests are gone with the cache rank: they are retracted from the batch and computed again. So are,
in either mode, requests that made a step without the answers that it waits for: the steps under way
are let go, and what they say of these requests is not used. On a server that only decodes, SGLang
brings retracted requests back as they were before these steps. Those of which the pool has not all
K and V end with an error; see disaggregation/hooks.py.

The result of the step that failed is still to be processed when requests are retracted, in the same
turn of SGLang's event loop, and is skipped for them. They must not be admitted again before, so
they enter the queue a turn later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from cache_rank.channels.control import ControlError
from cache_rank.channels.transport import TransportError
from cache_rank.protocol import Drop, End, Flush, Share
from sglang_ext import compat
from sglang_ext.metrics import CacheRankMetrics
from sglang_ext.two_ranks.exchange.base import Exchange
from sglang_ext.two_ranks.exchange.connection import CacheRankDownError, Connection
from sglang_ext.two_ranks.lifecycle import Lifecycle, Phase
from sglang_ext.two_ranks.step_plan import AttendedRound, StepPlan
from sglang_ext.two_ranks.supervisor import Supervisor
from sglang_ext.two_ranks.working_set import WorkingSetTable


class CacheRankClient:
    """The cache rank while it is up, and what its loss leaves to be done.

    Attributes:
        to_queue: requests that were retracted in this turn, and are queued in the next.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        begin_exchange: Callable[[Connection], Exchange],
        lifecycle: Lifecycle,
        table: WorkingSetTable,
        metrics: CacheRankMetrics,
        recomputes: bool,
        drafts: bool = False,
    ) -> None:
        """Connect to the cache rank that is up.

        Args:
            recomputes: whether sparse requests must be recomputed after a loss; else they go on
                dense.
            drafts: whether sparse steps only draft, and the pool verifies: nothing is stale then.
        """
        self.exchange: Exchange | None = None
        self.retractions = 0
        self.to_queue: list[Any] = []
        self._supervisor = supervisor
        self._begin_exchange = begin_exchange
        self._lifecycle = lifecycle
        self._table = table
        self._metrics = metrics
        self._recomputes = recomputes
        self._drafts = drafts
        self._orphans: list[Any] = []
        self._connect()

    def call(self, action: Callable[[Exchange], None]) -> None:
        """Do something with the cache rank, if it is up and stays up."""
        if self.exchange is None:
            return
        try:
            action(self.exchange)
        except (TransportError, ControlError, CacheRankDownError) as error:
            self._lose(str(error))

    def lose(self, why: Exception) -> None:
        """Let go of the cache rank because of what happened in a forward pass."""
        if self.exchange is not None:
            self._lose(str(why))

    def tell(self, message: Share | Drop | End | Flush) -> None:
        """Send a message that nothing follows, if the cache rank is up."""
        self.call(lambda exchange: exchange.connection.control.send(message))

    def follow_supervisor(self) -> None:
        """Let go of a cache rank that has ended, and connect to one that has been started."""
        connection = self._supervisor.connection
        if self.exchange is not None and connection is not self.exchange.connection:
            self._lose("its process ended")
        if self.exchange is None and connection is not None:
            try:
                self._connect()
            except RuntimeError as error:  # decode goes on without it, and another is started
                self._supervisor.fail(connection, str(error))

    def release(self) -> None:
        """End the cache rank, because SGLang, which is idle, releases memory."""
        self._supervisor.release()
        if self.exchange is not None:
            self._end_exchange(self.exchange)
        self._lifecycle.forget_shared()
        self._metrics.series.set("memory_released", 1)

    def resume(self) -> None:
        """Start a cache rank again, because SGLang has its memory back, and connect to it."""
        if not self._supervisor.is_released:
            return
        self._supervisor.resume()
        self._metrics.series.set("memory_released", 0)
        self.follow_supervisor()

    def _connect(self) -> None:
        connection = self._supervisor.connection
        if connection is None:
            return
        self.exchange = self._begin_exchange(connection)
        self._lifecycle.capacity_tokens = connection.capacity_tokens
        self._lifecycle.host_tokens = connection.host_tokens
        self._metrics.series.set("capacity_tokens", connection.capacity_tokens)

    def _lose(self, reason: str) -> None:
        """Go on without a cache rank: dense at once, or with what must be recomputed marked."""
        assert self.exchange is not None
        self._supervisor.fail(self.exchange.connection, reason)
        self._end_exchange(self.exchange)
        for row, sequence in list(self._lifecycle.live.items()):
            is_sparse = sequence.phase is Phase.SPARSE
            is_stale = is_sparse and not self._drafts
            sequence.statistics.stale_steps += is_stale
            self._metrics.series.add("stale_steps", int(is_stale))
            sequence.request.cache_rank_losses += 1
            if self._recomputes and is_sparse:
                sequence.orphaned = True
                self._orphans.append(sequence.request)
            else:
                self._lifecycle.end(row)
                self._table.forget(row)
        self._lifecycle.forget_shared()
        if not self._lifecycle.live:
            self._metrics.on_no_sparse_requests()

    def _end_exchange(self, exchange: Exchange) -> None:
        """Let go of an exchange whose process has been ended."""
        self.exchange = None
        exchange.close()

    # Requests that SGLang recomputes.

    @contextlib.contextmanager
    def without_stale(self, plan: StepPlan | AttendedRound) -> Iterator[None]:
        """Let SGLang skip, in the result of a step, the requests that missed their answers.

        They are retracted before the next batch, so that the step under way is skipped as well.
        """
        stale = self._take_stale(plan)
        were_retracted = [request.is_retracted for request in stale]
        for request in stale:
            request.is_retracted = True
        try:
            yield
        finally:
            for request, was_retracted in zip(stale, were_retracted, strict=True):
                request.is_retracted = was_retracted

    def _take_stale(self, plan: StepPlan | AttendedRound) -> list[Any]:
        sequences = plan.stale_requests()
        if not sequences:
            return []
        if self.exchange is not None and plan.exchange is self.exchange:
            self._lose("its answers do not come any more")
        stale = [sequence.request for sequence in sequences]
        self._orphans += [request for request in stale if request not in self._orphans]
        return stale

    def queue_retracted(self, scheduler: Any) -> None:
        """Queue the requests that were retracted a turn ago."""
        waiting, self.to_queue = self.to_queue, []
        for request in waiting:
            scheduler._add_request_to_queue(request, is_retracted=True)

    def retract_orphans(self, scheduler: Any, running_batch: Any) -> None:
        """Retract the requests of a batch that have to be computed again."""
        orphans, self._orphans = self._orphans, []
        if not orphans:
            return
        staying = []
        for index, request in enumerate(running_batch.reqs):
            if request in orphans and not request.finished():
                compat.release_request(running_batch, index, scheduler.server_args)
                self._queue_later(scheduler, request)
            else:
                staying.append(index)
        running_batch.filter_batch(keep_indices=staying)
        running_batch.batch_is_full = False

    def retract_left(self, scheduler: Any) -> None:
        """Retract the requests that left the batch before their last step, which has failed."""
        left = [each for each in self._orphans if _has_left(each, scheduler.running_batch)]
        for request in left:
            self._orphans.remove(request)
            compat.release_left(request, scheduler)
            self._queue_later(scheduler, request)

    def abort_retracted(self, scheduler: Any, abort: Callable[[], None]) -> None:
        """Let an abort find the requests that are to be queued a turn later."""
        waiting, self.to_queue = self.to_queue, []
        _retracted_queue(scheduler).extend(waiting)
        abort()
        left = _retracted_queue(scheduler)
        for request in waiting:
            if request in left:
                left.remove(request)
                self.to_queue.append(request)

    def _queue_later(self, scheduler: Any, request: Any) -> None:
        if request.cache_rank_kv_is_gone:  # it ends here
            scheduler._add_request_to_queue(request, is_retracted=True)
            return
        request.cache_rank_statistics.retractions += 1
        self.retractions += 1
        self._metrics.series.add("retractions", 1)
        self.to_queue.append(request)


def _retracted_queue(scheduler: Any) -> Any:
    """The list in which SGLang looks for retracted requests."""
    if scheduler.server_args.disaggregation_mode == "decode":
        return scheduler.disagg_decode_prealloc_queue.retracted_queue
    return scheduler.waiting_queue


def _has_left(request: Any, running_batch: Any) -> bool:
    """Whether a request has left the batch, and its last result has not ended it."""
    return (
        compat.SKIPS_FINISHING
        and request not in running_batch.reqs
        and not request.finished()
        and compat.pool_state(request).req_pool_idx is not None
    )
