"""Prompts come back from the GPU of the cache rank, by NCCL, while others decode."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import wait_until
from workload import (
    DENSE,
    GPU_FLAGS,
    LIKELY_TOKENS,
    cached,
    random_prompts,
    same_but_for_rounding,
)

from scripts.shared.serving import Server, serve

pytestmark = [pytest.mark.gpu(2, ranks=True), pytest.mark.timeout(600)]

PAGE = 256
FLAGS = (
    "--inference-kv working-set --skip-tokenizer-init --sparse-threshold 1024 --sparse-budget 512 "
    "--recent-tokens 32 --max-swap-tokens 64 --query-predictor last --cache-rank-timeout 10"
).split()


@pytest.fixture(scope="module", params=["peer", "nccl"])
def server(request: pytest.FixtureRequest, deep_model: Path) -> Iterator[Server]:
    carried_by = json.dumps({"cache_rank_transfer_backend": request.param})
    flags = [*FLAGS, "--cache-rank-config", carried_by, "--model-path", str(deep_model)]
    with serve([*GPU_FLAGS, *flags]) as running:
        yield running


def test_what_comes_back_is_what_was_computed(server: Server) -> None:
    """In bfloat16, so that what is attended to densely differs by rounding only."""
    server.flush_cache()
    free = server.cache_rank()["pool_free_tokens"]
    for prompt in random_prompts([4000, 1300, 2100], seed=21):
        expected = server.generate(prompt, 100, **LIKELY_TOKENS, **DENSE)
        assert cached(expected) == 0
        server.generate(prompt, 100)
        for options in (DENSE, {}):
            found = server.generate(prompt, 100, **LIKELY_TOKENS, **options)
            assert cached(found) == (len(prompt) - 1) // PAGE * PAGE
            if options:
                same_but_for_rounding(found, expected)
    state = server.wait_for(20, sequences=0)
    assert state["pool_free_tokens"] == free
    assert (state["losses"], state["refused_messages"]) == (0, 0)


def test_prompts_come_back_while_others_decode(server: Server) -> None:
    prompts = random_prompts([3000, 2500, 2000, 1500], seed=22)
    server.generate_all(prompts, 100)
    others = random_prompts([1800] * 3, seed=23)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.generate_all, others, 600)
        server.wait_for(60, sparse_requests=3)
        responses = server.generate_all(prompts, 100)
        assert all(len(one["output_ids"]) == 600 for one in under_way.result())
    for prompt, response in zip(prompts, responses, strict=True):
        assert cached(response) == len(prompt) // PAGE * PAGE
        assert response["meta_info"]["cache_rank"]["sparse_steps"] > 20
    state = server.wait_for(20, sequences=0)
    assert (state["losses"], state["refused_messages"]) == (0, 0)


@pytest.mark.parametrize("sent", [signal.SIGKILL, None])
def test_a_cache_rank_that_is_lost_costs_a_prefill(server: Server, sent: int | None) -> None:
    """It is stopped when pages are asked for, and is killed or not heard of any more."""
    (prompt,) = random_prompts([3000], seed=24)
    server.generate(prompt, 100)
    before = server.wait_for(20, up=True, sequences=0)
    pid = server.signal_cache_rank(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.generate, prompt, 100)
        if sent is not None:
            time.sleep(1)
            os.kill(pid, sent)
        response = under_way.result()
    assert cached(response) == 0
    assert len(response["output_ids"]) == 100
    wait_until(lambda: server.cache_rank()["starts"] > before["starts"], 60)
    server.wait_for(60, up=True, sequences=0, pool_free_tokens=before["pool_free_tokens"])
    server.generate(prompt, 100)
    assert cached(server.generate(prompt, 100)) == len(prompt) // PAGE * PAGE
