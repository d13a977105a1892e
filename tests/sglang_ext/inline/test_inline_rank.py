"""Requests come to slots and leave them: who is sparse, and what users see of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_requests import fake_request

from sglang_ext import hooks, reuse
from sglang_ext.drafts.number import DraftNumber
from sglang_ext.inline import starting
from sglang_ext.inline.rank import InlineRank
from sglang_ext.inline.selection import NEVER
from sglang_ext.payoff import Payoff, StepTime
from sglang_ext.request_state import prepare_requests

# After ours, which makes SGLang importable without a GPU.
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # isort: skip
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (  # isort: skip
    DecodeCudaGraphRunner,
)

SLOTS, THRESHOLD = 4, 100


class Scheduler:
    """Gives requests slots, and steps, as SGLang does."""

    def __init__(self, deterministic: bool = False, **changes: Any) -> None:
        self.sparse_from = torch.full((SLOTS,), NEVER, dtype=torch.int32)
        self.selection: Any = SimpleNamespace(
            sparse_from=self.sparse_from,
            sketch_bytes=12,
            step_is_sparse=True,
            curve="a tenth",
            attended=lambda length: length // 10,
        )
        usual = {
            "sparse_from": THRESHOLD,
            "reuse_sparse_tokens": "off",
            "placement": "inline",
            "served_model_name": "model",
            "enable_metrics": False,
            "decode_log_interval": 40,
            "enable_deterministic_inference": deterministic,
        }
        args: Any = SimpleNamespace(**usual | changes)
        self.rank = InlineRank(args, self.selection, tp_rank=0)
        self.seen: list[list[int]] = []
        """What the selection knew of slots in each forward pass."""
        self.was_sparse: list[bool] = []
        """Whether each forward pass was to select."""

    def forward(self) -> str:
        self.seen.append(self.sparse_from.tolist())
        self.was_sparse.append(self.selection.step_is_sparse)
        return "result"

    def prefill(self, *requests: Any) -> None:
        assert self.rank.run_other(list(requests), self.forward) == "result"

    def decode(self, lengths: list[int], *requests: Any) -> None:
        assert self.rank.run_decode(list(requests), lengths, self.forward) == "result"

    def free(self, request: Any) -> None:
        self.rank.on_request_freed(request)
        request.req_pool_idx = None

    def state(self) -> dict[str, Any]:
        pool = SimpleNamespace(available_size=lambda: 30)
        tree = SimpleNamespace(token_to_kv_pool_allocator=pool, evictable_size=lambda: 12)
        return self.rank.state(tree)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


def request(slot: int | None, dense: bool = False) -> Any:
    custom = {"cache_rank": False} if dense else None
    return fake_request(
        req_pool_idx=slot,
        extra_key=None,
        sampling_params=SimpleNamespace(custom_params=custom),
    )


def statistics(one: Any) -> tuple[int, str | None]:
    prepare_requests([one])
    found = one.cache_rank_statistics
    return found.sparse_steps, found.dense_reason


def test_a_slot_is_told_before_its_first_step_and_not_again(scheduler: Scheduler) -> None:
    one, other = request(2), request(0, dense=True)
    scheduler.prefill(one)
    assert scheduler.seen == [[NEVER, NEVER, THRESHOLD, NEVER]]
    scheduler.sparse_from[2] = 7  # what is known is not written at every step
    scheduler.prefill(one)  # the next chunk of its prompt
    scheduler.decode([50], one)
    scheduler.prefill(other)
    assert [seen[2] for seen in scheduler.seen[1:]] == [7, 7, 7]
    assert [seen[0] for seen in scheduler.seen] == [NEVER] * 4


def test_a_request_that_was_retracted_is_told_of_its_new_slot(scheduler: Scheduler) -> None:
    one = request(0)
    scheduler.prefill(one)
    scheduler.decode([150], one)
    scheduler.free(one)
    assert reuse.dense_tokens(one) is None  # all of it is computed anew
    dense = request(0, dense=True)
    scheduler.prefill(dense)
    one.req_pool_idx = 3
    scheduler.prefill(one)
    assert scheduler.seen[-1] == [NEVER, NEVER, NEVER, THRESHOLD]
    scheduler.decode([151, 200], one, dense)
    assert statistics(one) == (2, None)  # over both of its lives
    assert statistics(dense) == (0, "asked")
    assert reuse.dense_tokens(one) == 150


def test_the_state_names_requests_that_are_sparse_now(scheduler: Scheduler) -> None:
    one, other = request(0), request(1)
    scheduler.prefill(one, other)
    assert scheduler.state() == {
        "placement": "inline",
        "steps": 0,
        "sparse_requests": 0,
        "pool_free_tokens": 42,
        "sparse_budget": "a tenth",
        "sketch_bytes": 12,
        "seconds_of_steps": None,
        "drafts": None,
        "draft_weight_bytes": None,
    }
    scheduler.decode([200, 99], one, other)
    assert scheduler.state()["sparse_requests"] == 1
    scheduler.decode([201, 100], one, other)
    assert scheduler.state()["sparse_requests"] == 2
    scheduler.free(one)
    assert scheduler.state()["sparse_requests"] == 1  # although no step has come since
    scheduler.free(other)
    assert (scheduler.state()["sparse_requests"], scheduler.state()["steps"]) == (0, 2)


def test_a_request_is_kept_apart_from_other_weights_while_it_has_no_slot(
    scheduler: Scheduler,
) -> None:
    waiting, running = request(None), request(1)
    for one in (waiting, running):
        scheduler.rank.before_match(one)
    assert (waiting.extra_key, running.extra_key) == (None, None)
    scheduler.rank.on_weights_updated()
    for one in (waiting, running):
        scheduler.rank.before_match(one)
    assert waiting.extra_key is not None
    assert running.extra_key is None


def test_sketches_are_fitted_again_at_the_first_prefill_by_other_weights(
    scheduler: Scheduler,
) -> None:
    """And once, as soon as there is room for it."""
    room = [False, True]
    scheduler.rank.fit_again = lambda: room.pop(0)
    one = request(0)
    scheduler.prefill(one)
    scheduler.rank.on_weights_updated()
    scheduler.decode([50], one)
    assert room == [False, True]
    scheduler.prefill(one)
    assert room == [True]
    for _ in range(2):
        scheduler.rank.on_weights_updated()
        scheduler.prefill(one)
        assert room == []


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_step_without_sparse_requests_is_sglangs_own(deterministic: bool) -> None:
    """But not where the tokens of a request must not hang on the others in its batch."""
    scheduler = Scheduler(deterministic)
    one, other, asked = request(0), request(1), request(2, dense=True)
    scheduler.decode([99, 30], one, other)
    scheduler.decode([100, 31], one, other)
    scheduler.decode([32, 5000], other, asked)
    assert scheduler.was_sparse == [deterministic, True, deterministic]


def test_a_batch_size_has_a_graph_for_each_kind_of_step(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "_current", scheduler.rank)
    runner = object.__new__(DecodeCudaGraphRunner)
    runner.capture_forward_mode = ForwardMode.DECODE
    make_key = DecodeCudaGraphRunner._make_graph_key

    def key_of(size: int) -> Any:
        return hooks.name_graph(make_key(runner, size), runner, size)

    captured: dict[Any, bool] = {}

    def capture_one_stream(_: Any) -> None:
        for size in (8, 4):
            captured[key_of(size)] = scheduler.selection.step_is_sparse

    hooks.capture_both_kinds(capture_one_stream, runner)
    assert len(captured) == 4
    assert scheduler.selection.step_is_sparse  # as before the capture
    for is_sparse in (False, True):
        scheduler.selection.step_is_sparse = is_sparse
        assert [captured[key_of(size)] for size in (8, 4)] == [is_sparse] * 2

    captured.clear()
    runner.capture_forward_mode = ForwardMode.TARGET_VERIFY
    hooks.capture_both_kinds(capture_one_stream, runner)
    scheduler.selection.step_is_sparse = False
    assert {*captured} == {key_of(8), key_of(4)}  # whatever the step before was


def test_a_round_drafts_for_those_that_are_long(scheduler: Scheduler) -> None:
    """Whatever is no draft is dense, and may be reused."""
    one, short, dense = request(0), request(1), request(2, dense=True)
    scheduler.rank.drafts = DraftNumber(3, None)
    scheduler.prefill(one, short, dense)
    assert scheduler.rank.plan_drafts([one, short, dense], [200, 50, 300]) == 3
    assert statistics(one) == (3, None)
    assert statistics(short) == (0, "below_threshold")
    assert statistics(dense) == (0, "asked")
    scheduler.selection.step_is_sparse = False
    step = [one, short, dense], [200, 50, 300], lambda: scheduler.selection.step_is_sparse
    assert scheduler.rank.run_draft(*step)
    assert not scheduler.rank.run_dense(*step)
    assert scheduler.state()["steps"] == 3
    assert reuse.dense_tokens(one) is None

    assert scheduler.rank.plan_drafts([short], [51]) == 0  # there is nothing to select
    scheduler.decode([204, 52, 301], one, short, dense)
    assert scheduler.was_sparse[-1] is False
    assert statistics(one)[0] == 3


def test_requests_are_sparse_together_where_that_is_shorter(scheduler: Scheduler) -> None:
    """Of 200 tokens and 30 dense ones, 20 and 30 are attended to, and 200 scored."""
    one, short, dense = request(0), request(1), request(2, dense=True)
    scheduler.prefill(one, short, dense)
    lengths = [200, 20, 10]
    costs = StepTime(1.0, 0.01)
    for dense_least, is_shorter in ((1.0, True), (-0.9, False), (-0.7, True)):
        scheduler.rank.payoff = Payoff(StepTime(dense_least, 0.01), costs, 1, 0)
        scheduler.decode(lengths, one, short, dense)
        assert scheduler.was_sparse[-1] == is_shorter
        reasons = [statistics(each)[1] for each in (one, short, dense)]
        assert reasons == [
            None if is_shorter else "not_shorter",
            "below_threshold",
            "below_threshold",
        ]
    assert statistics(one)[0] == 2
    assert reuse.dense_tokens(one) == 199  # a sparse step has computed the last one
