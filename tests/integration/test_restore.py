"""What the cache rank has of a prompt comes back into SGLang's pool, and is not prefilled again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from workload import (
    DENSE,
    LIKELY_TOKENS,
    REUSE,
    SMALL_CACHE_RANK,
    STRICT,
    STRICT_POOL,
    WORKING_SET,
    difference,
    log_probabilities,
    random_prompts,
)

from scripts.shared.serving import Server, serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

pytestmark = pytest.mark.xdist_group("plain server")

PAGE = 256
NEW_TOKENS = 40
PROMPT, QUESTION = random_prompts([700, 25], seed=12)
LOSSY = [("qwen2", "lynx"), ("qwen3", "hack")]


@pytest.fixture
def server(working_set_server: Server) -> Server:
    """Its sparse steps attend to everything."""
    return working_set_server


@pytest.fixture(autouse=True)
def _empty(server: Server) -> None:
    server.flush_cache()
    server.wait_for(10, tokens_held=0, tokens_kept=0)


def cached(response: Any) -> int:
    return int(response["meta_info"]["cached_tokens"])


def assert_equal(response: Any, dense: Any) -> None:
    assert response["output_ids"] == dense["output_ids"]
    assert difference(log_probabilities(response), log_probabilities(dense)) < 1e-5


def assert_nothing_left(server: Server, free: int, pages: int) -> None:
    state = server.wait_for(10, sequences=0, tokens_held=PAGE * pages, tokens_kept=PAGE * pages)
    assert state["pool_free_tokens"] == free
    assert state["refused_messages"] == 0


def test_a_prompt_that_is_asked_again_is_not_prefilled_again(
    server: Server, plain_server: Server
) -> None:
    free = server.cache_rank()["pool_free_tokens"]
    restored = server.cache_rank()["tokens_restored"]
    dense = plain_server.generate(PROMPT, NEW_TOKENS, return_logprob=True)
    for hit in (0, 2 * PAGE, 2 * PAGE):
        response = server.generate(PROMPT, NEW_TOKENS, return_logprob=True)
        assert cached(response) == hit
        assert response["meta_info"]["cache_rank"]["sparse_steps"] > 10
        assert_equal(response, dense)
    assert server.cache_rank()["tokens_restored"] - restored == 4 * PAGE
    assert_nothing_left(server, free, 2)


def test_each_turn_of_a_conversation_begins_with_the_last_ones(
    server: Server, plain_server: Server
) -> None:
    free = server.cache_rank()["pool_free_tokens"]
    prompt, hits = PROMPT, []
    for _ in range(3):
        dense = plain_server.generate(prompt, NEW_TOKENS, return_logprob=True)
        response = server.generate(prompt, NEW_TOKENS, return_logprob=True)
        assert_equal(response, dense)
        hits.append(cached(response))
        prompt = prompt + response["output_ids"] + QUESTION
    assert hits == [0, 2 * PAGE, 2 * PAGE]  # 765 tokens, and then 830
    again = server.generate(prompt, 1, sampling_params=DENSE["sampling_params"])
    assert cached(again) == 3 * PAGE  # held as they were shipped, so that it may have them
    assert_nothing_left(server, free, 3)


def test_requests_have_a_common_prompt(server: Server, plain_server: Server) -> None:
    free = server.cache_rank()["pool_free_tokens"]
    prompts = [PROMPT[:PAGE] + other for other in random_prompts([30] * 4, seed=13)]
    dense = plain_server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
    server.generate(PROMPT, 4 * NEW_TOKENS)
    responses = server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
    for response, expected in zip(responses, dense, strict=True):
        assert cached(response) == PAGE
        assert_equal(response, expected)
    assert_nothing_left(server, free, 2)


def test_a_request_that_is_retracted_finds_its_prompt_again(
    server: Server, plain_server: Server
) -> None:
    free, before = (server.cache_rank()[name] for name in ("pool_free_tokens", "tokens_restored"))
    dense = plain_server.generate(PROMPT, 200, return_logprob=True)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.generate, PROMPT, 200, return_logprob=True)
        server.wait_for(30, sparse_requests=1)
        server.post("/pause_generation", {"mode": "retract"}).raise_for_status()
        server.post("/continue_generation").raise_for_status()
        assert_equal(under_way.result(), dense)
    assert server.cache_rank()["tokens_restored"] - before == 2 * PAGE
    assert_nothing_left(server, free, 2)


def test_a_prefix_ends_where_log_probabilities_begin(server: Server, plain_server: Server) -> None:
    server.generate(PROMPT, NEW_TOKENS)
    for start, hit in ((0, 0), (300, PAGE), (690, 2 * PAGE)):
        options = {"return_logprob": True, "logprob_start_len": start}
        response, dense = (one.generate(PROMPT, 5, **options) for one in (server, plain_server))
        assert cached(response) == hit
        ours, theirs = (
            [entry[0] for entry in one["meta_info"]["input_token_logprobs"][1:]]
            for one in (response, dense)
        )
        assert difference(ours, theirs) < 1e-5
        assert_equal(response, dense)


def test_namespaces_are_kept_apart(server: Server) -> None:
    server.generate(PROMPT, NEW_TOKENS, extra_key="one")
    assert cached(server.generate(PROMPT, 1, extra_key="other")) == 0
    assert cached(server.generate(PROMPT, 1, extra_key="one")) == 2 * PAGE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGCONT, None])
def test_a_cache_rank_that_does_not_answer_costs_a_prefill(
    server: Server, plain_server: Server, number: int | None
) -> None:
    """It is stopped when pages are asked for, and is then killed, goes on, or is not heard of."""
    free = server.cache_rank()["pool_free_tokens"]
    dense = plain_server.generate(PROMPT, NEW_TOKENS, return_logprob=True)
    server.generate(PROMPT, NEW_TOKENS)
    server.wait_for(10, sequences=0)
    pid = server.signal_cache_rank(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.generate, PROMPT, NEW_TOKENS, return_logprob=True)
        if number is not None:
            time.sleep(1.5)
            os.kill(pid, number)
        response = under_way.result()
    goes_on = number == signal.SIGCONT
    assert cached(response) == 2 * PAGE * goes_on
    assert_equal(response, dense)
    state = server.wait_for(60, up=True, sequences=0)
    assert (state["pid"] == pid) == goes_on
    assert state["pool_free_tokens"] == free
    after = server.generate(PROMPT, NEW_TOKENS, return_logprob=True)
    assert_equal(after, dense)


def test_a_request_is_aborted_while_its_pages_are_awaited(server: Server) -> None:
    free = server.cache_rank()["pool_free_tokens"]
    server.generate(PROMPT, NEW_TOKENS)
    server.wait_for(10, sequences=0)
    pid = server.signal_cache_rank(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.generate, PROMPT, 400, rid="aborted")
        time.sleep(1)
        server.post("/abort_request", {"rid": "aborted"}).raise_for_status()
        os.kill(pid, signal.SIGCONT)
        assert under_way.result()["meta_info"]["finish_reason"]["type"] == "abort"
    assert_nothing_left(server, free, 2)


def test_prompts_move_to_the_host_and_come_back(
    random_model: Callable[..., Path], plain_server: Server
) -> None:
    memory = ["--cache-rank-mem-fraction", "0.001", "--cache-rank-host-gb", "1"]
    flags = [*SMALL_CACHE_RANK, *REUSE, *WORKING_SET, *memory, "--model-path", str(random_model())]
    dense = plain_server.generate(PROMPT, NEW_TOKENS, return_logprob=True)
    with serve(flags, {ALLOW_LARGE_BUDGET_VARIABLE: "1", **STRICT}) as server:
        free = server.cache_rank()["pool_free_tokens"]
        server.generate(PROMPT, NEW_TOKENS)
        seeds = iter(range(100, 200))
        while not server.cache_rank()["tokens_on_host"]:
            server.generate_all(random_prompts([700] * 3, seed=next(seeds)), NEW_TOKENS)
        response = server.generate(PROMPT, NEW_TOKENS, return_logprob=True)
        assert cached(response) == 2 * PAGE
        assert_equal(response, dense)
        state = server.wait_for(10, sequences=0)
        assert state["tokens_held"] == state["tokens_kept"] > state["capacity_tokens"]
        server.flush_cache()
        state = server.wait_for(10, tokens_held=0, bytes_held=0, tokens_on_host=0)
        assert state["pool_free_tokens"] == free
        assert state["refused_messages"] == 0


@pytest.mark.parametrize(
    ("family", "kv_residency"),
    [("llama", "quantspec"), *(pytest.param(*case, marks=pytest.mark.thorough) for case in LOSSY)],
)
def test_what_comes_back_of_codes_is_close(
    random_model: Callable[..., Path], family: str, kv_residency: str
) -> None:
    flags = [*SMALL_CACHE_RANK, *REUSE, *WORKING_SET, "--kv-residency", kv_residency]
    model = ["--model-path", str(random_model(family, heads=2, kv_heads=2))]
    with serve([*flags, *model], {ALLOW_LARGE_BUDGET_VARIABLE: "1", **STRICT_POOL}) as server:
        dense = server.generate(PROMPT, 1, **LIKELY_TOKENS)
        server.generate(PROMPT, NEW_TOKENS)
        pages = server.wait_for(10, sequences=0)["tokens_kept"] // PAGE
        assert pages in (1, 2)
        response = server.generate(PROMPT, 1, **LIKELY_TOKENS)
        assert cached(response) == PAGE * pages
        assert cached(server.generate(PROMPT, 1, **DENSE)) == 0
    ours, theirs = (
        {token: likely for likely, token, *_ in one["meta_info"]["output_top_logprobs"][0]}
        for one in (response, dense)
    )
    best = max(theirs, key=lambda token: theirs[token])
    assert abs(ours[best] - theirs[best]) < 0.1
