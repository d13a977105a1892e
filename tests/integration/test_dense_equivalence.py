"""With a budget of at least the length, sparse decode is dense decode."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from workload import DENSE, assert_same_answers, random_prompts

from scripts.shared.serving import Server

pytestmark = pytest.mark.xdist_group("plain server")

THRESHOLD = 100
NEW_TOKENS = 60
# Below, just below, at and above the threshold; the longest needs five bulk chunks.
PROMPTS = random_prompts([30, 60, 99, 100, 101, 150, 228, 300])


@pytest.fixture
def server(working_set_server: Server) -> Server:
    """Working sets alone are in the pool; test_reuse.py has a server with whole contexts."""
    return working_set_server


@pytest.mark.releases
def test_log_probabilities_equal_plain_sglang(server: Server, plain_server: Server) -> None:
    # Plain SGLang differs from itself by up to 1e-5 between batches of different sizes.
    expected = plain_server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    found = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    assert_same_answers(found, expected)
    for prompt, response in zip(PROMPTS, found, strict=True):
        # The shortest prompt stays below the threshold to its end, all others turn sparse.
        statistics = response["meta_info"]["cache_rank"]
        is_long = len(prompt) + NEW_TOKENS > THRESHOLD + 10
        assert (statistics["sparse_steps"] > 0) == is_long
        assert statistics["dense_reason"] == (None if is_long else "below_threshold")


@pytest.mark.releases
def test_a_long_prompt_is_prefilled_in_chunks_first(plain_server: Server, server: Server) -> None:
    (prompt,) = random_prompts([1900], seed=1)
    dense = plain_server.generate(prompt, 40, return_logprob=True)
    # Thirty chunks are shipped one a step: the request is sparse only for the last steps.
    assert_same_answers([server.generate(prompt, 40, return_logprob=True)], [dense])


def test_a_request_may_stay_dense(server: Server) -> None:
    response = server.generate(PROMPTS[-1], NEW_TOKENS, **DENSE)
    assert response["meta_info"]["cache_rank"] == {
        "sparse_steps": 0,
        "dense_reason": "asked",
        "attended_tokens": 0,
        "tokens_shipped": 0,
        "late_steps": 0,
        "stale_steps": 0,
        "retractions": 0,
        "wire_drafts": 0,
        "wire_drafts_accepted": 0,
    }


@pytest.mark.releases
def test_requests_begin_at_once_whose_answers_would_not_fit_into_the_pool(server: Server) -> None:
    """Sparse requests free their rows; whole answers of two fit."""
    prompts = random_prompts([110] * 4)
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(server.generate_all, prompts, 900)
        server.wait_for(30, sparse_requests=4)
        server.post("/abort_request", {"abort_all": True})
        lengths = [len(answer["output_ids"]) for answer in answers.result()]
    assert max(lengths) - min(lengths) < 100


@pytest.mark.releases
def test_memory_returns_on_both_ranks(server: Server) -> None:
    free = server.cache_rank()["pool_free_tokens"]
    server.generate_all(PROMPTS, 20)
    assert server.wait_for(10, sequences=0)["pool_free_tokens"] == free
    server.flush_cache()
    server.wait_for(10, tokens_held=0, bytes_held=0)
    server.generate_all(PROMPTS[-2:], NEW_TOKENS)
