"""Prefixes come from SGLang's radix cache, and are what plain SGLang would have computed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from workload import (
    DENSE,
    REUSE,
    SMALL_CACHE_RANK,
    STRICT,
    assert_same_answers,
    cached,
    difference,
    log_probabilities,
    random_prompts,
    sparse_steps,
    streamed,
)

from scripts.shared.serving import Server, serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

pytestmark = pytest.mark.xdist_group("plain server")

NEW_TOKENS = 60
PROMPT, OTHER, QUESTION = random_prompts([300, 300, 25], seed=3)


@pytest.fixture(
    scope="module",
    params=["reusing_server", pytest.param("inline_server", marks=pytest.mark.releases)],
)
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def _empty_tree(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        flush(request.getfixturevalue("server"))


def flush(server: Server) -> None:
    server.flush_cache()


@pytest.mark.parametrize("shared", [1, 64, 129, 299])
def test_a_hit_of_any_length_changes_no_answer(
    server: Server, plain_server: Server, shared: int
) -> None:
    prompt = PROMPT[:shared] + OTHER[shared:]
    dense = plain_server.generate(prompt, NEW_TOKENS, return_logprob=True)
    server.generate(PROMPT, 1)
    for least, options in ((shared, {}), (len(prompt) - 1, DENSE)):
        response = server.generate(prompt, NEW_TOKENS, return_logprob=True, **options)
        assert cached(response) == least
        assert (sparse_steps(response) > 40) == (options is not DENSE)
        assert_same_answers([response], [dense])


def test_what_sparse_steps_wrote_is_computed_again(server: Server, plain_server: Server) -> None:
    first = server.generate(PROMPT, NEW_TOKENS)
    prompt = PROMPT + first["output_ids"] + QUESTION
    dense = plain_server.generate(prompt, NEW_TOKENS, return_logprob=True)
    response = server.generate(prompt, NEW_TOKENS, return_logprob=True, **DENSE)
    # The step of the overlap schedule beyond the end may be sparse, too; its token is not kept.
    assert len(PROMPT) <= cached(response) <= len(PROMPT) + NEW_TOKENS - sparse_steps(first)
    assert_same_answers([response], [dense])
    # This turn was dense, so the next one finds all of it.
    again = server.generate(prompt + response["output_ids"] + QUESTION, 5, **DENSE)
    assert cached(again) >= len(prompt) + NEW_TOKENS - 1


@pytest.mark.parametrize(
    "server",
    [pytest.param("reusing_server", marks=pytest.mark.thorough), "inline_server"],
    indirect=True,
)
def test_a_row_that_the_tree_has_twice_is_not_read_when_it_is_freed(
    server: Server, plain_server: Server
) -> None:
    """The last token of a known prompt is computed again, and only one row of it is kept."""
    dense = plain_server.generate(PROMPT, 400, return_logprob=True)
    server.generate(PROMPT, 2)
    sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    sampling |= DENSE["sampling_params"]
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    chunks = streamed(server, body)
    next(chunks)  # it decodes before anything else is prefilled
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(lambda: deque(chunks, maxlen=1).pop())
        rounds = 0
        while not last.done():  # others write every row that is free
            server.generate_all(random_prompts([400] * 4, seed=10 + rounds), 20)
            rounds += 1
    response = last.result()
    assert rounds > 1
    assert cached(response) == len(PROMPT) - 1
    assert response["meta_info"]["cache_rank"]["retractions"] == 0
    assert_same_answers([response], [dense], tolerance=1e-4)  # of 400 steps


@pytest.mark.releases
def test_what_the_radix_cache_has_evicted_comes_back(
    reusing_server: Server, plain_server: Server
) -> None:
    """Of a known prompt the tree has only what a later one begins with, too."""
    server, free = reusing_server, reusing_server.cache_rank()["pool_free_tokens"]
    prompt, end, *others = random_prompts([900, 30, 1100, 900], seed=14)
    dense = plain_server.generate(prompt, NEW_TOKENS, return_logprob=True)
    server.generate(prompt, NEW_TOKENS)
    assert cached(server.generate(prompt[:300] + end, 1)) == 300
    for other in others:
        server.generate(other, 1)
    response = server.generate(prompt, NEW_TOKENS, return_logprob=True)
    details = response["meta_info"]["cached_tokens_details"]
    assert cached(response) == details["device"] + details["host"] == 3 * 256
    assert 300 <= details["device"] < 500
    assert_same_answers([response], [dense])
    again = server.generate(prompt, 1)
    assert cached(again) == 899  # what came back is in the tree
    server.flush_cache()
    assert server.cache_rank()["pool_free_tokens"] == free


def test_many_share_a_prompt_under_pressure(server: Server, plain_server: Server) -> None:
    free = server.cache_rank()["pool_free_tokens"]
    prompts = [PROMPT + one for one in random_prompts([20] * 12, seed=4)]
    dense = plain_server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
    server.generate(PROMPT, 1)
    # Without reuse, the pool holds six of them.
    for options in (DENSE, {}):
        responses = server.generate_all(prompts, NEW_TOKENS, return_logprob=True, **options)
        assert all(cached(response) >= len(PROMPT) for response in responses)
        for response, expected in zip(responses, dense, strict=True):
            ours, theirs = log_probabilities(response), log_probabilities(expected)
            assert difference(ours, theirs) < 1e-5
    assert sum(sparse_steps(response) > 40 for response in responses) >= 8
    # Others push them out of the tree.
    others = random_prompts([350] * 12, seed=5)
    server.generate_all(others, NEW_TOKENS)
    assert cached(server.generate(PROMPT + QUESTION, 1)) < len(PROMPT)
    # Selection in SGLang's process has no sequences, and no messages.
    counts = {"sequences", "refused_messages"} & server.cache_rank().keys()
    server.wait_for(15, pool_free_tokens=free, **dict.fromkeys(counts, 0))


@pytest.mark.thorough
def test_requests_that_ask_for_it_attend_to_what_was_computed_densely(
    plain_server: Server, random_model: Callable[..., Path]
) -> None:
    flags = [*SMALL_CACHE_RANK, *REUSE, "--sparse-budget", "32", "--max-swap-tokens", "8"]
    flags += ["--hysteresis", "4", "--reuse-sparse-tokens", "on"]
    with serve([*flags, "--model-path", str(random_model())], STRICT) as server:
        first = server.generate(PROMPT, NEW_TOKENS)
        prompt = PROMPT + first["output_ids"] + QUESTION
        dense = plain_server.generate(prompt, NEW_TOKENS, return_logprob=True)
        for _ in range(2):
            response = server.generate(prompt, NEW_TOKENS, return_logprob=True, **DENSE)
            assert_same_answers([response], [dense])
        assert cached(response) == len(prompt) - 1
        response = server.generate(prompt, NEW_TOKENS, return_logprob=True)
        assert cached(response) >= len(PROMPT) + NEW_TOKENS - 1
        assert sparse_steps(response) > 40
        # What it attends to is not what plain SGLang computed: there is a reason for the default.
        assert difference(log_probabilities(response)[:1], log_probabilities(dense)[:1]) > 1e-5


@pytest.fixture(scope="module")
def server_with_priorities(random_model: Callable[..., Path]) -> Iterator[Server]:
    flags = [*SMALL_CACHE_RANK, *REUSE, "--sparse-budget", "1024", "--max-swap-tokens", "64"]
    flags += ["--max-running-requests", "2", "--radix-eviction-policy", "priority"]
    flags += ["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "0"]
    environment = {ALLOW_LARGE_BUDGET_VARIABLE: "1", **STRICT}
    with serve([*flags, "--model-path", str(random_model())], environment) as running:
        yield running


@pytest.mark.thorough
def test_what_is_evicted_first_has_the_lowest_priority(server_with_priorities: Server) -> None:
    server = server_with_priorities
    flush(server)
    dear, cheap, *others = random_prompts([600, 600, 500, 500, 500], seed=13)
    for prompt, priority in ((dear, 10), (cheap, -10)):
        assert sparse_steps(server.generate(prompt, NEW_TOKENS, priority=priority)) > 30
    for prompt in others:
        server.generate(prompt, 1, priority=0)
    assert cached(server.generate(dear, 1, priority=10)) == len(dear) - 1  # it was there longest
    assert cached(server.generate(cheap, 1, priority=10)) < len(cheap) - 1


@pytest.mark.thorough
def test_a_sparse_request_that_is_preempted_goes_on_where_it_was(
    server_with_priorities: Server, plain_server: Server
) -> None:
    server = server_with_priorities
    flush(server)
    free = server.wait_for(10, sequences=0)["pool_free_tokens"]
    prompts = random_prompts([300] * 3, seed=14)
    lengths = [400, 400, NEW_TOKENS]
    # Two at a time as below: the rounding of 400 tokens depends on it.
    dense = plain_server.generate_all(prompts[:2], lengths[0], return_logprob=True)
    dense.append(plain_server.generate(prompts[2], lengths[2], return_logprob=True))
    low: list[Any] = []
    options = {"return_logprob": True, "priority": 0}
    running = threading.Thread(
        target=lambda: low.extend(server.generate_all(prompts[:2], lengths[0], **options))
    )
    running.start()
    server.wait_for(30, sparse_requests=2)
    high = server.generate(prompts[2], lengths[2], return_logprob=True, priority=10)
    assert running.is_alive(), "both places were taken"
    running.join()
    assert_same_answers([*low, high], dense)
    assert min(map(sparse_steps, [*low, high])) > 30
    assert sorted(one["meta_info"]["num_retractions"] for one in low) == [0, 1]
    state = server.wait_for(10, sequences=0)
    assert state["pool_free_tokens"] == free
    assert state["refused_messages"] == 0
