"""Prefixes come from SGLang's radix cache, and are what plain SGLang would have computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from workload import DENSE, SMALL_CACHE_RANK, difference, random_prompts

from scripts.shared.serving import Server, log_probabilities, serve
from sglang_ext.flags import CHECKSUM_VARIABLE

pytestmark = pytest.mark.xdist_group("plain server")

NEW_TOKENS = 60
PROMPT, OTHER, QUESTION = random_prompts([300, 300, 25], seed=3)
FLAGS = (
    "--skip-tokenizer-init --sparse-threshold 100 --sparse-budget 32 --delta-capacity 8 "
    "--selection-margin 4 --max-total-tokens 2500 --chunked-prefill-size 128"
).split()
ENVIRONMENT = {CHECKSUM_VARIABLE: "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"}


@pytest.fixture(scope="module")
def server(random_model: Callable[..., Path]) -> Iterator[Server]:
    flags = [*SMALL_CACHE_RANK, *FLAGS, "--model-path", str(random_model())]
    with serve(flags, ENVIRONMENT) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty_tree(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        flush(request.getfixturevalue("server"))


def flush(server: Server) -> None:
    assert server.post("/flush_cache", {}).status_code == 200


def cached(response: Any) -> int:
    return int(response["meta_info"]["cached_tokens"])


def sparse_steps(response: Any) -> int:
    return int(response["meta_info"]["cache_rank"]["sparse_steps"])


@pytest.mark.parametrize("shared", [1, 63, 64, 127, 128, 129, 250, 299])
def test_a_hit_of_any_length_changes_no_answer(
    server: Server, plain_server: Server, shared: int
) -> None:
    prompt = PROMPT[:shared] + OTHER[shared:]
    unshared = server.generate(prompt, NEW_TOKENS, return_logprob=True)
    flush(server)
    server.generate(PROMPT, 1)
    response = server.generate(prompt, NEW_TOKENS, return_logprob=True)
    assert cached(unshared) == 0
    assert cached(response) == shared
    assert sparse_steps(response) == sparse_steps(unshared) > 40
    assert response["output_ids"] == unshared["output_ids"]
    assert difference(log_probabilities(response), log_probabilities(unshared)) < 1e-5
    dense = plain_server.generate(prompt, NEW_TOKENS, return_logprob=True)
    of_hit = server.generate(prompt, NEW_TOKENS, return_logprob=True, **DENSE)
    assert cached(of_hit) >= shared
    assert difference(log_probabilities(of_hit), log_probabilities(dense)) < 1e-5


def test_what_sparse_steps_wrote_is_computed_again(server: Server, plain_server: Server) -> None:
    first = server.generate(PROMPT, NEW_TOKENS)
    prompt = PROMPT + first["output_ids"] + QUESTION
    dense = plain_server.generate(prompt, NEW_TOKENS, return_logprob=True)
    response = server.generate(prompt, NEW_TOKENS, return_logprob=True, **DENSE)
    # The step of the overlap schedule beyond the end may be sparse, too; its token is not kept.
    assert len(PROMPT) < cached(response) <= len(PROMPT) + NEW_TOKENS - sparse_steps(first)
    assert response["output_ids"] == dense["output_ids"]
    assert difference(log_probabilities(response), log_probabilities(dense)) < 1e-5
    # This turn was dense, so the next one finds all of it.
    again = server.generate(prompt + response["output_ids"] + QUESTION, 5, **DENSE)
    assert cached(again) >= len(prompt) + NEW_TOKENS - 1


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
            stop = NEW_TOKENS - sparse_steps(response)
            ours, theirs = log_probabilities(response), log_probabilities(expected)
            assert difference(ours[:stop], theirs[:stop]) < 1e-5
    assert sum(sparse_steps(response) > 40 for response in responses) >= 8
    # Others push them out of the tree.
    others = random_prompts([350] * 12, seed=5)
    server.generate_all(others, NEW_TOKENS)
    assert cached(server.generate(PROMPT + QUESTION, 1)) < len(PROMPT)
    state = server.wait_for(15, tokens_held=0, bytes_held=0, epochs=0)
    assert state["pool_free_tokens"] == free
    assert state["refused_messages"] == 0


@pytest.mark.thorough
def test_sparse_tokens_are_reused_by_requests_that_are_sparse_themselves(
    plain_server: Server, random_model: Callable[..., Path]
) -> None:
    flags = [*SMALL_CACHE_RANK, *FLAGS, "--model-path", str(random_model())]
    with serve([*flags, "--reuse-sparse-tokens", "on"], ENVIRONMENT) as server:
        first = server.generate(PROMPT, NEW_TOKENS)
        prompt = PROMPT + first["output_ids"] + QUESTION
        dense = plain_server.generate(prompt, NEW_TOKENS, return_logprob=True)
        for found in (0, len(prompt) - 1):
            response = server.generate(prompt, NEW_TOKENS, return_logprob=True, **DENSE)
            assert cached(response) == found
            assert difference(log_probabilities(response), log_probabilities(dense)) < 1e-5
        response = server.generate(prompt, NEW_TOKENS, return_logprob=True)
        assert cached(response) >= len(PROMPT) + NEW_TOKENS - 1
        assert sparse_steps(response) > 40
        # What it attends to is not what plain SGLang computed: there is a reason for the default.
        assert difference(log_probabilities(response)[:1], log_probabilities(dense)[:1]) > 1e-5
