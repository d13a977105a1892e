"""An inference rank without SGLang, which loses the real cache rank that it has."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_requests import fake_request
from test_metrics import exported, own_series

from cache_rank.budget import BudgetCurve
from cache_rank.config import CacheRankConfig, ModelShape
from cache_rank.pages import PAGE_TOKENS
from sglang_ext.memory import reserve_rows
from sglang_ext.pools import Pools
from sglang_ext.request_state import prepare_requests
from sglang_ext.two_ranks.exchange.base import Exchange
from sglang_ext.two_ranks.exchange.connection import Connection, ProcessSettings
from sglang_ext.two_ranks.inference_rank import InferenceRank
from sglang_ext.two_ranks.lifecycle import MOST_LOSSES, Phase
from sglang_ext.two_ranks.step_plan import StepPlan
from sglang_ext.two_ranks.supervisor import Supervisor

MODEL = ModelShape(2, query_heads=2, kv_heads=1, head_dim=64, dtype="float32", scale=1 / 8)
SLOTS, CONTEXT, PROMPT = 3, 400, 150
MOST_STEPS = 100
LONG = 60.0
"""A timeout that no passing test reaches."""


def config_of(model: ModelShape, max_rows: int) -> CacheRankConfig:
    return CacheRankConfig(
        model,
        layers_per_group=1,
        sparse_budget=8,
        sink_tokens=2,
        recent_tokens=4,
        query_window=2,
        hysteresis=2,
        max_swap_tokens=8,
        max_rows=max_rows,
        kv_residency="hack",  # refuses what is not finite
    )


ARGS: Any = SimpleNamespace(
    attention_backend="torch_native",
    bulk_chunk_tokens=CONTEXT,
    cache_rank_config=config_of,
    decode_log_interval=1000,
    dense_layers=0,
    enable_metrics=True,
    inference_kv="full",
    kv_residency="bf16",
    disable_radix_cache=True,
    max_sparse_requests=2,
    only_decodes=False,
    served_model_name="model",
    sink_tokens=2,
    budget_curve=BudgetCurve.flat(8),
    sparse_from=100,
    sparse_anyway_from=100,
    trace=None,
)


class Decoding:
    """A server's decode steps, of one request a slot."""

    def __init__(self) -> None:
        rows = SLOTS * CONTEXT + reserve_rows(ARGS)
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = (
            [torch.randn((rows, 1, 64), generator=generator) for _ in range(2)] for _ in range(2)
        )
        self.tokens = torch.arange(SLOTS * CONTEXT, dtype=torch.int32).view(SLOTS, CONTEXT)
        self.supervisor = Supervisor(
            "cache rank of a test", ProcessSettings("127.0.0.1"), LONG, 0.0
        )
        pools = Pools(self.tokens, self.keys, self.values, None)
        self.rank = InferenceRank(ARGS, MODEL, pools, 0, self.supervisor, None)
        self._generator = generator

    def arrive(self, slot: int, prompt: int = PROMPT) -> Any:
        params = SimpleNamespace(custom_params=None, max_new_tokens=CONTEXT - prompt)
        request = fake_request(
            req_pool_idx=slot,
            origin_input_ids=[0] * prompt,
            sampling_params=params,
            length=prompt,
        )
        prepare_requests([request])
        return request

    def step(self, request: Any) -> StepPlan:
        """A decode step of one request, as hooks and attention make it."""
        request.length += 1
        return self.rank.decode_step.run([request], [request.length], self.forward)[1]

    def forward(self) -> None:
        gate = self.rank.gate
        for group in range(MODEL.layers):
            gate.enter_group(group)
            queries, keys, values = (
                torch.randn((1, heads, 64), generator=self._generator) for heads in (2, 1, 1)
            )
            gate.stage(group, 0, queries, keys, values)
            gate.leave_group(group)

    def step_until(self, request: Any, condition: Callable[[], bool]) -> None:
        """Decode, with a cache rank or none, until something has happened."""
        for _ in range(MOST_STEPS):
            if condition():
                return
            self.step(request)
            self.wait_until(lambda: self.supervisor.connection is not None)
        raise AssertionError(f"did not happen in {MOST_STEPS} steps")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        stop = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < stop, "did not happen in time"
            time.sleep(0.02)

    def phase_of(self, request: Any) -> Phase | None:
        sequence = self.rank.lifecycle.live.get(request.req_pool_idx)
        return sequence.phase if sequence is not None else None


@pytest.fixture(scope="module")
def shared() -> Iterator[Decoding]:
    with own_series():
        decoding = Decoding()
        yield decoding
        decoding.supervisor.close()


@pytest.fixture
def decoding(shared: Decoding) -> Decoding:
    """One inference rank for all tests; a cache rank that one of them has ended is back."""
    shared.wait_until(lambda: shared.supervisor.connection is not None)
    return shared


def test_a_loss_leaves_no_sparse_request_and_no_count_behind(decoding: Decoding) -> None:
    rank, request = decoding.rank, decoding.arrive(slot=1)
    decoding.step_until(request, lambda: decoding.phase_of(request) is Phase.SPARSE)
    assert exported("sparse_requests") == 1
    assert exported("up_bytes_total") == 0, "too few steps to be exported"

    lost = decoding.supervisor.connection
    assert lost is not None
    os.kill(lost.process.pid, signal.SIGKILL)
    decoding.wait_until(lambda: decoding.supervisor.connection is not lost)
    decoding.step(request)
    assert exported("sparse_requests") == 0
    assert exported("up_bytes_total") == rank.metrics.counters.up_bytes > 0

    decoding.step_until(request, lambda: decoding.phase_of(request) is Phase.SPARSE)
    rank.on_request_freed(request)
    assert exported("sparse_requests") == 0


def test_a_step_in_which_the_cache_rank_is_lost_is_taken_back(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, request = decoding.rank.cache_rank, decoding.arrive(slot=1)
    decoding.step_until(request, lambda: decoding.phase_of(request) is Phase.SPARSE)
    before, lost = decoding.step(request), decoding.supervisor.connection
    assert lost is not None
    with monkeypatch.context() as patched:
        patched.setattr(client, "follow_supervisor", lambda: None)  # it is found out in the step
        os.kill(lost.process.pid, signal.SIGKILL)
        lost.process.wait()
        plan = decoding.step(request)
    assert client.exchange is None
    assert plan.sparse
    for step, is_stale in ((before, False), (plan, True)):
        request.is_retracted = False
        with client.without_stale(step):
            assert request.is_retracted == is_stale
    client.retract_orphans(Mock(), Mock(reqs=[]))
    decoding.rank.on_request_freed(request)


def test_metrics_follow_while_prompts_are_shipped_and_nothing_is_sparse(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse, shipped = decoding.arrive(slot=1), decoding.arrive(slot=2)
    decoding.step_until(sparse, lambda: decoding.phase_of(sparse) is Phase.SPARSE)
    monkeypatch.setattr(decoding.rank._shipping, "_chunk_tokens", 4)
    before = exported("bulk_bytes_total")
    decoding.step(shipped)
    decoding.rank.on_request_freed(sparse)
    for _ in range(3):
        decoding.step(shipped)
    assert decoding.phase_of(shipped) is Phase.SHIPPING
    assert exported("sparse_requests") == 0
    assert exported("bulk_bytes_total") > before
    decoding.rank.on_request_freed(shipped)


def test_another_is_started_when_a_lost_connection_cannot_be_closed(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, closed = decoding.supervisor.connection, Connection.close
    assert lost is not None

    def close(connection: Connection) -> None:
        closed(connection)
        if connection is lost:
            raise RuntimeError("the device does not answer")

    monkeypatch.setattr(Connection, "close", close)
    os.kill(lost.process.pid, signal.SIGKILL)
    decoding.wait_until(lambda: decoding.supervisor.connection not in (None, lost))


@pytest.mark.parametrize("prompt", [PROMPT, PAGE_TOKENS + 30], ids=["as it is", "as codes"])
def test_a_request_that_ends_cache_ranks_is_shipped_to_no_third(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch, prompt: int
) -> None:
    monkeypatch.setattr(decoding.rank._shipping, "_chunk_tokens", PROMPT + MOST_STEPS)
    rank, request = decoding.rank, decoding.arrive(2, prompt)
    before, starts = rank.metrics.counters.bulk_bytes, decoding.supervisor.starts
    decoding.keys[1][2 * CONTEXT + 5] = float("nan")
    decoding.step_until(request, lambda: request.cache_rank_losses == MOST_LOSSES)
    decoding.wait_until(lambda: decoding.supervisor.starts == starts + MOST_LOSSES)
    connection = decoding.supervisor.connection
    for _ in range(5):
        decoding.step(request)
        assert decoding.phase_of(request) is None
    assert request.cache_rank_statistics.dense_reason == "cache_rank_losses"
    shipped = (rank.metrics.counters.bulk_bytes - before) / (MOST_LOSSES * prompt)
    assert (shipped < 0.5 * MODEL.bytes_per_token) == (prompt > PROMPT)

    # Who comes next is served by the cache rank that is left.
    rank.on_request_freed(request)
    healthy = decoding.arrive(slot=1)
    decoding.step_until(healthy, lambda: decoding.phase_of(healthy) is Phase.SPARSE)
    assert decoding.supervisor.connection is connection
    rank.on_request_freed(healthy)


def test_a_connection_that_cannot_be_used_is_given_up_for_another(
    decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, request = decoding.rank, decoding.arrive(slot=1)
    decoding.step_until(request, lambda: decoding.phase_of(request) is Phase.SPARSE)
    lost, begin, refused = decoding.supervisor.connection, rank.cache_rank._begin_exchange, []

    def begin_exchange(connection: Connection) -> Exchange:
        if not refused:
            refused.append(connection)
            raise RuntimeError("no memory for its buffers")
        return begin(connection)

    monkeypatch.setattr(rank.cache_rank, "_begin_exchange", begin_exchange)
    assert lost is not None
    os.kill(lost.process.pid, signal.SIGKILL)
    decoding.wait_until(lambda: decoding.supervisor.connection is not lost)
    decoding.step_until(request, lambda: bool(refused))
    assert decoding.phase_of(request) is None
    decoding.step_until(request, lambda: decoding.phase_of(request) is Phase.SPARSE)
    assert decoding.supervisor.connection not in (lost, refused[0])
    rank.on_request_freed(request)
