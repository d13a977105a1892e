"""A long random trace of arrivals, aborts, retractions, flushes and losses leaves nothing behind.

Prompts begin as others do, or go on where a conversation has got to. A longer trace, of another
seed by RANDOM_TRACE_SEED:

    RANDOM_TRACE_OPERATIONS=6000 make test ARGS="tests/integration/test_random_trace.py --timeout 0"

Both ranks compare checksums of every slot at every step, and SGLang checks its pools after every
batch. Where SGLang's own process selects, there is nothing to lose; the trace is one of a server
that other tests have used, and that selects every token.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from endings import assert_it_stops, assert_its_processes_follow_a_dead_scheduler
from workload import SMALL_CACHE_RANK, STRICT, random_prompts

from scripts.shared.serving import Server, serve

SEED = int(os.environ.get("RANDOM_TRACE_SEED", "0"))
OPERATIONS = int(os.environ.get("RANDOM_TRACE_OPERATIONS", "240"))
OPERATIONS_A_LOSS = 240
"""The cache rank is killed in the middle of each so many."""

MOST_SPARSE = 6
MOST_AT_ONCE = 12
EXCHANGE = [
    *("--max-swap-tokens", "8", "--hysteresis", "4"),
    *("--max-sparse-requests", str(MOST_SPARSE)),  # runs out at times
    *("--cache-rank-config", '{"cache_rank_max_restart_delay": 1}'),
]
SHARED_PROMPTS = 3
LONGEST_CONVERSATION = 500


def random_operation(source: random.Random) -> tuple[str, *tuple[Any, ...]]:
    """Draw an operation, whose lengths lie on both sides of the threshold."""
    kinds = ("arrive", "decode", "abort", "retract", "flush")
    (kind,) = source.choices(kinds, weights=(16, 16, 6, 3, 3))
    if kind == "arrive":
        sparse_allowed = source.random() < 0.8
        begins = source.choice(("alone", "shared", "shared", "conversation"))
        place = source.randrange(1000), source.random()
        return kind, begins, place, source.randint(10, 400), source.randint(1, 150), sparse_allowed
    if kind == "decode":
        return kind, source.randint(10, 80)  # milliseconds
    if kind == "abort":
        return kind, source.randrange(MOST_AT_ONCE)
    return (kind,)


class Trace:
    """A trace applies operations to a server and counts what happened."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.active: dict[str, Future[Any]] = {}
        self.finished: list[Any] = []
        self.prompts: dict[str, list[int]] = {}
        self.said: list[list[int]] = []
        self.happened: Counter[str] = Counter()
        self.losses = 0
        self._names = (f"trace-{index}" for index in itertools.count())
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE)

    def apply(self, kind: str, *values: Any) -> None:
        self._collect()
        getattr(self, kind)(*values)
        self.happened[kind] += 1

    def arrive(
        self,
        begins: str,
        place: tuple[int, float],
        prompt_tokens: int,
        new_tokens: int,
        sparse: bool,
    ) -> None:
        if len(self.active) == MOST_AT_ONCE:
            wait(self.active.values(), timeout=120, return_when=FIRST_COMPLETED)
            self._collect()
        name = next(self._names)
        (prompt,) = random_prompts([prompt_tokens], seed=prompt_tokens)
        which, share = place
        if begins == "shared":
            (shared,) = random_prompts([400], seed=1000 + which % SHARED_PROMPTS)
            common = min(prompt_tokens, round(2 * share * prompt_tokens))
            prompt[:common] = shared[:common]
        elif begins == "conversation" and self.said:
            earlier = self.said[which % len(self.said)]
            prompt = earlier[: round(2 * share * len(earlier))] + prompt[:40]
        parameters = {} if sparse else {"custom_params": {"cache_rank": False}}
        self.prompts[name] = prompt
        self.active[name] = self._pool.submit(
            self.server.generate, prompt, new_tokens, rid=name, sampling_params=parameters
        )

    def decode(self, milliseconds: int) -> None:
        time.sleep(milliseconds / 1000)

    def abort(self, index: int) -> None:
        if index < len(self.active):
            name = list(self.active)[index]
            assert self.server.post("/abort_request", {"rid": name}).status_code == 200

    def retract(self) -> None:
        self.server.post("/pause_generation", {"mode": "retract"}).raise_for_status()
        self.server.post("/continue_generation").raise_for_status()

    def flush(self) -> None:
        # Refused while requests run; that must be harmless, too.
        assert self.server.post("/flush_cache").status_code in (200, 400)

    def lose(self) -> None:
        if (state := self.server.cache_rank())["up"]:
            os.kill(state["pid"], signal.SIGKILL)
            self.losses += 1

    def finish(self) -> None:
        for name, future in self.active.items():
            self._keep(name, future.result(timeout=120))
        self.active.clear()
        self._pool.shutdown()

    def _collect(self) -> None:
        for name, future in list(self.active.items()):
            if future.done():
                self._keep(name, self.active.pop(name).result())

    def _keep(self, name: str, response: Any) -> None:
        self.finished.append(response)
        said = self.prompts.pop(name) + response.get("output_ids", [])
        self.said = [*self.said[-3:], said[:LONGEST_CONVERSATION]]


def assert_all_can_be_sparse(server: Server) -> None:
    """No row of the reserve is missing."""

    def found_none() -> float:
        wanted = "dense_requests_total", 'reason="max_sparse_requests"'
        lines = server.get("/metrics").text.splitlines()
        return sum(float(li.split()[-1]) for li in lines if all(part in li for part in wanted))

    before = found_none()
    responses = server.generate_all(random_prompts([150] * MOST_SPARSE, seed=99), 100)
    statistics = [response["meta_info"]["cache_rank"] for response in responses]
    assert min(one["sparse_steps"] for one in statistics) > 10
    assert found_none() == before


@pytest.mark.parametrize(
    "inference_kv", [pytest.param("full", marks=pytest.mark.releases), "working-set"]
)
def test_nothing_is_left_behind(inference_kv: str, random_model: Callable[..., Path]) -> None:
    arguments = [
        *SMALL_CACHE_RANK,
        *EXCHANGE,
        *("--model-path", str(random_model()), "--skip-tokenizer-init"),
        *("--sparse-threshold", "100", "--sparse-budget", "32"),
        *("--max-total-tokens", "2500"),  # runs out at times
        *("--inference-kv", inference_kv),
    ]
    environment = {**STRICT, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "41"}
    with serve(arguments, environment) as server:
        free = server.cache_rank()["pool_free_tokens"]
        trace = run_trace(server, OPERATIONS_A_LOSS)
        assert "Testing retraction." in server.log.read_text(errors="replace")
        if inference_kv == "working-set":  # SGLang counts nothing of it for retracted requests
            assert server.cache_rank()["tokens_restored"] > 0
        else:
            assert cached_tokens(trace) > 2000
        assert_nothing_is_left_on_both_ranks(server, free, trace.losses)
        if inference_kv == "working-set":
            assert_its_processes_follow_a_dead_scheduler(server)
        else:
            assert_it_stops(server, signal.SIGINT)


@pytest.mark.releases
@pytest.mark.xdist_group("plain server")
def test_nothing_is_left_behind_where_nothing_is_shipped(inline_server: Server) -> None:
    inline_server.flush_cache()
    free = inline_server.cache_rank()["pool_free_tokens"]
    trace = run_trace(inline_server)
    assert cached_tokens(trace) > 2000
    assert_nothing_is_left(inline_server, free)


def run_trace(server: Server, operations_a_loss: int = 0) -> Trace:
    """Apply random operations, and check that what should happen in a trace has happened."""
    trace = Trace(server)
    source = random.Random(SEED)
    for index in range(OPERATIONS):
        if operations_a_loss and index % operations_a_loss == operations_a_loss // 2:
            trace.apply("lose")
        trace.apply(*random_operation(source))
    trace.finish()

    happened, finished = trace.happened, trace.finished
    assert min(happened[kind] for kind in ("arrive", "abort", "retract", "flush")) > 9, happened
    reasons = Counter(r["meta_info"]["finish_reason"]["type"] for r in finished)
    assert set(reasons) <= {"length", "abort"}
    assert reasons["length"] > 20
    statistics = [r["meta_info"].get("cache_rank", {}) for r in finished]
    assert sum(one.get("sparse_steps", 0) > 0 for one in statistics) > 10
    assert sum(r["meta_info"].get("num_retractions", 0) for r in finished) > 10
    return trace


def cached_tokens(trace: Trace) -> int:
    return sum(r["meta_info"].get("cached_tokens", 0) for r in trace.finished)


def assert_nothing_is_left(server: Server, free: int) -> None:
    assert server.wait_for(15, sparse_requests=0)["pool_free_tokens"] == free
    server.flush_cache()
    assert server.cache_rank()["pool_free_tokens"] == free
    assert_all_can_be_sparse(server)


def assert_nothing_is_left_on_both_ranks(server: Server, free: int, losses: int) -> None:
    server.wait_for(60, up=True)
    assert server.wait_for(15, sequences=0)["pool_free_tokens"] == free
    state = server.cache_rank()
    assert state["tokens_held"] == state["tokens_kept"]
    assert state["tokens_adopted"] > 0
    server.flush_cache()
    state = server.wait_for(15, tokens_held=0, bytes_held=0)
    assert state["pool_free_tokens"] == free
    assert state["losses"] == losses > 0
    assert state["starts"] == 1 + losses
    assert state["refused_messages"] == 0
    assert_all_can_be_sparse(server)
