"""Requests whose K and V are gone with a cache rank are retracted, and queued a turn later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_requests import fake_request

from cache_rank.channels.transport import TransportError
from cache_rank.protocol import End, Flush
from sglang_ext import compat
from sglang_ext.metrics import _COUNTERS
from sglang_ext.request_state import RequestStatistics
from sglang_ext.two_ranks.inference_rank import InferenceRank
from sglang_ext.two_ranks.lifecycle import Phase, SparseSequence
from sglang_ext.two_ranks.recovery import CacheRankClient
from sglang_ext.two_ranks.step_plan import StepPlan


class Requests:
    """Requests of a batch, each with a sequence, and a cache rank that they lose."""

    def __init__(self, *phases: Phase, recomputes: bool = True) -> None:
        self.requests = [self._request(f"request {index}") for index in range(len(phases))]
        self.sequences = [
            SparseSequence(1 + row, request, row, 0, 0, RequestStatistics(), phase)
            for row, (request, phase) in enumerate(zip(self.requests, phases, strict=True))
        ]
        self.live = {sequence.row: sequence for sequence in self.sequences}
        self.exchange: Any = Mock()
        self.supervisor, self.table, self.metrics = Mock(), Mock(), Mock()
        self.exchange.connection = self.supervisor.connection
        lifecycle: Any = SimpleNamespace(
            live=self.live, end=self._end, capacity_tokens=0, forget_shared=lambda: None
        )
        parts = (lifecycle, self.table, self.metrics)
        self.client = CacheRankClient(
            self.supervisor, lambda connection: self.exchange, *parts, recomputes
        )

    def _request(self, name: str) -> Any:
        request = Mock(cache_rank_losses=0, is_retracted=False, cache_rank_kv_is_gone=False)
        request.name, request.cache_rank_statistics = name, RequestStatistics()
        request.finished.return_value = False
        return request

    def _end(self, row: int) -> None:
        self.live.pop(row).ended = True

    def lose(self) -> None:
        def fail(exchange: Any) -> None:
            raise TransportError("the peer is gone")

        self.client.call(fail)

    def plan(self, missed: list[SparseSequence]) -> Any:
        """A step of all sparse requests, some of which missed their answers."""
        sparse = [sequence for sequence in self.sequences if sequence.phase is Phase.SPARSE]
        self.exchange.stale_requests.return_value = [each for each in sparse if each in missed]
        return StepPlan(step=7, sparse=sparse, exchange=self.exchange)

    def batch(self, *requests: Any) -> Any:
        return Mock(reqs=list(requests), batch_is_full=True)


def test_sparse_requests_leave_the_batch_and_are_queued_a_turn_later() -> None:
    batch_of = Requests(Phase.WARMING, Phase.SPARSE, Phase.SPARSE)
    kept, orphan, done = batch_of.requests
    batch_of.lose()
    assert batch_of.client.exchange is None
    assert [sequence.orphaned for sequence in batch_of.sequences] == [False, True, True]
    assert [sequence.ended for sequence in batch_of.sequences] == [True, False, False]
    assert [request.cache_rank_losses for request in batch_of.requests] == [1, 1, 1]

    scheduler, batch = Mock(), batch_of.batch(kept, orphan, done)
    done.finished.return_value = True
    batch_of.client.retract_orphans(scheduler, batch)
    assert batch.release_req.call_args.args[:2] == (1, 3)
    batch.filter_batch.assert_called_once_with(keep_indices=[0, 2])
    assert batch.batch_is_full is False
    assert batch_of.client.to_queue == [orphan]
    counted = {call.args[0] for call in batch_of.metrics.series.add.call_args_list}
    assert counted == {"stale_steps", "retractions"} <= {*_COUNTERS}
    assert (batch_of.client.retractions, orphan.cache_rank_statistics.retractions) == (1, 1)
    scheduler._add_request_to_queue.assert_not_called()

    later = batch_of.batch(kept, done)
    batch_of.client.queue_retracted(scheduler)
    batch_of.client.retract_orphans(scheduler, later)
    scheduler._add_request_to_queue.assert_called_once_with(orphan, is_retracted=True)
    assert later.mock_calls == []
    assert later.batch_is_full is True
    assert batch_of.client.to_queue == []


@pytest.mark.parametrize("has_finished", [False, True])
def test_an_orphan_that_has_left_the_batch_and_ended_is_left_alone(has_finished: bool) -> None:
    batch_of = Requests(Phase.SPARSE)
    batch_of.lose()
    batch = batch_of.batch()
    (request,) = batch_of.requests
    request.finished.return_value = has_finished
    compat.pool_state(request).req_pool_idx = 3 if has_finished else None
    batch_of.client.retract_left(Mock(running_batch=batch))
    batch_of.client.retract_orphans(Mock(), batch)
    batch.release_req.assert_not_called()
    assert batch_of.client.to_queue == []


@pytest.mark.skipif(not compat.SKIPS_FINISHING, reason="requests stay until they have finished")
def test_an_orphan_that_has_left_the_batch_before_its_last_result_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "release_left", released := Mock())
    batch_of, scheduler = Requests(Phase.SPARSE), Mock()
    batch_of.lose()
    scheduler.running_batch = batch_of.batch()
    batch_of.client.retract_left(scheduler)
    batch_of.client.retract_orphans(scheduler, scheduler.running_batch)
    released.assert_called_once_with(batch_of.requests[0], scheduler)
    assert batch_of.client.to_queue == batch_of.requests


@pytest.mark.parametrize("recomputes", [False, True], ids=["full", "working-set"])
@pytest.mark.parametrize("noticed", [False, True], ids=["before the loss is noticed", "after"])
def test_what_a_step_says_of_requests_that_missed_their_answers_is_skipped(
    recomputes: bool, noticed: bool
) -> None:
    batch_of = Requests(Phase.WARMING, Phase.SPARSE, Phase.SPARSE, recomputes=recomputes)
    warming, answered, missed = batch_of.sequences
    plan = batch_of.plan(missed=[warming, missed])
    if noticed:
        batch_of.lose()
    with batch_of.client.without_stale(plan):
        assert [r.is_retracted for r in batch_of.requests] == [False, False, True]
    assert [r.is_retracted for r in batch_of.requests] == [False, False, False]
    assert batch_of.client.exchange is None
    batch_of.exchange.stale_requests.assert_called_once_with(7, [answered, missed])

    batch = batch_of.batch(*batch_of.requests)
    batch_of.client.retract_orphans(Mock(), batch)
    retracted = [answered, missed] if recomputes else [missed]
    assert batch_of.client.to_queue == [sequence.request for sequence in retracted]


def test_without_recomputing_every_sequence_ends_and_nothing_is_retracted() -> None:
    batch_of = Requests(Phase.SHIPPING, Phase.SPARSE, recomputes=False)
    batch_of.lose()
    assert [sequence.ended for sequence in batch_of.sequences] == [True, True]
    assert [call.args for call in batch_of.table.forget.call_args_list] == [(0,), (1,)]
    assert [sequence.statistics.stale_steps for sequence in batch_of.sequences] == [0, 1]
    assert [request.cache_rank_losses for request in batch_of.requests] == [1, 1]
    batch = batch_of.batch(*batch_of.requests)
    batch_of.client.retract_orphans(Mock(), batch)
    assert batch.mock_calls == []


def test_messages_are_sent_while_the_cache_rank_is_up() -> None:
    batch_of = Requests(Phase.SPARSE)
    batch_of.client.tell(Flush())
    batch_of.exchange.connection.control.send.assert_called_once_with(Flush())
    batch_of.lose()
    batch_of.client.tell(End([1]))
    batch_of.exchange.connection.control.send.assert_called_once()


@pytest.mark.parametrize(("mode", "queue"), [("null", "waiting"), ("decode", "retracted")])
def test_an_abort_finds_requests_that_are_queued_a_turn_later(mode: str, queue: str) -> None:
    """On a decode server requests of the waiting queue have a slot, which an abort frees."""
    client = Requests().client
    queued, aborted, kept = "queued", "aborted", "kept"
    client.to_queue = [aborted, kept]
    queues = SimpleNamespace(waiting_queue=["other"], retracted_queue=["other"])
    setattr(queues, f"{queue}_queue", [queued])
    queues.server_args = SimpleNamespace(disaggregation_mode=mode)
    queues.disagg_decode_prealloc_queue = queues

    def abort() -> None:  # as SGLang, which makes a new list of one of them
        found = getattr(queues, f"{queue}_queue")
        setattr(queues, f"{queue}_queue", [each for each in found if each != aborted])

    client.abort_retracted(queues, abort)
    assert sorted([*queues.waiting_queue, *queues.retracted_queue]) == ["other", queued]
    assert client.to_queue == [kept]


def test_an_orphan_whose_k_and_v_are_gone_ends_at_once() -> None:
    """SGLang's queue is told, which ends it; see `end_what_is_gone`."""
    batch_of, scheduler = Requests(Phase.SPARSE), Mock()
    batch_of.lose()
    (request,) = batch_of.requests
    request.cache_rank_kv_is_gone = True
    batch_of.client.retract_orphans(scheduler, batch_of.batch(request))
    scheduler._add_request_to_queue.assert_called_once_with(request, is_retracted=True)
    assert (batch_of.client.to_queue, batch_of.client.retractions) == ([], 0)


# What SGLang tells an inference rank.


@pytest.fixture
def rank() -> Any:
    rank: Any = Mock()
    rank.eviction.evict.return_value = False
    rank.cache_rank.call.side_effect = lambda action: action(rank.exchange)
    return rank


@pytest.mark.parametrize(
    ("live", "decodes"),
    [({}, False), ({1: Mock()}, True), ({1: Mock()}, False)],
    ids=["idle", "exchanging", "a prompt is coming"],
)
def test_a_lost_cache_rank_is_noticed_while_nothing_decodes(
    rank: Any, live: Any, decodes: bool
) -> None:
    rank.lifecycle.live = live
    InferenceRank.before_next_batch(rank, Mock(), Mock(is_empty=lambda: not decodes))
    assert rank.cache_rank.follow_supervisor.called == (not decodes)


@pytest.mark.parametrize("evicted", [False, True])
def test_the_batch_is_not_full_any_more_when_tokens_were_evicted(rank: Any, evicted: bool) -> None:
    rank.eviction.evict.return_value = evicted
    scheduler, batch = Mock(), Mock(batch_is_full=True)
    InferenceRank.before_next_batch(rank, scheduler, batch)
    assert batch.batch_is_full is not evicted
    called = [name for name, _, _ in rank.cache_rank.mock_calls]
    assert called[-2:] == ["queue_retracted", "retract_orphans"], "in this order"


def test_a_prompt_is_of_the_weights_by_which_its_prefill_begins(rank: Any) -> None:
    request = fake_request(req_pool_idx=None, extra_key="tenant", sampling_params=Mock())

    def found_with(updates: int, slot: int | None) -> tuple[str, int]:
        rank.lifecycle.weight_updates, request.req_pool_idx = updates, slot
        InferenceRank.before_match(rank, request)
        return request.extra_key, request.cache_rank_weights

    assert found_with(0, None) == ("tenant", 0)
    assert found_with(1, None) == ("cache rank [weights 1] tenant", 1)  # it has waited
    assert found_with(2, None) == ("cache rank [weights 2] tenant", 2)
    assert found_with(3, slot=3) == ("cache rank [weights 2] tenant", 2)  # its next chunk
    assert found_with(3, None) == ("cache rank [weights 3] tenant", 3)  # it was retracted
