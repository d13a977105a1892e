"""The cache rank verifies drafts of requests whose tokens have left SGLang's pool."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until
from workload import (
    DENSE,
    LIKELY_TOKENS,
    REUSE,
    SMALL_CACHE_RANK,
    STRICT_POOL,
    assert_same_answers,
    cached,
    difference,
    log_probabilities,
    random_prompts,
    same_but_for_rounding,
)

from scripts.shared.serving import Server, serve

pytestmark = [pytest.mark.xdist_group("verified elsewhere"), pytest.mark.releases]

NEW_TOKENS, POOL = 80, 2500
PROMPTS = random_prompts([30, 60, 101, 150, 300, 700])
FLAGS = [
    *(*SMALL_CACHE_RANK, *REUSE),
    *"--inference-kv working-set --sparse-budget 40 --cache-rank-timeout 8".split(),
    *"--speculative-algorithm CACHE_RANK".split(),
]


@pytest.fixture(scope="module", params=[1, 0], ids=["a dense layer", "no dense layer"])
def server(request: pytest.FixtureRequest, random_model: Callable[..., Path]) -> Iterator[Server]:
    """Tokens are held as they came. Drafts attend to 52 of them: many drafts are wrong."""
    flags = [*FLAGS, "--dense-layers", str(request.param), "--model-path", str(random_model())]
    with serve(flags, STRICT_POOL) as running:
        yield running


once = pytest.mark.parametrize("server", [1], indirect=True, ids=["a dense layer"])
"""What happens is the same without one.

It is the fixture's first parameter, because pytest tells servers apart by the parameter's number.
"""


def statistics(answer: Any, name: str) -> Any:
    return answer["meta_info"]["cache_rank"][name]


def all_is_free(server: Server) -> bool:
    return bool(server.cache_rank()["pool_free_tokens"] == POOL)


def test_greedy_answers_equal_plain_sglang(server: Server, plain_server: Server) -> None:
    """Of short and long requests at once, and of one that stays in the pool."""
    expected = plain_server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    answers = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    with ThreadPoolExecutor() as pool:
        stays = pool.submit(server.generate, PROMPTS[4], NEW_TOKENS, return_logprob=True, **DENSE)
        again = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    for found in (answers, again):
        assert_same_answers(found, expected, tolerance=1e-4)
        assert [statistics(each, "dense_reason") for each in found[3:]] == [None] * 3
        of_last = found[-1]["meta_info"]
        assert 0 < of_last["spec_num_correct_drafts"] < 7 * of_last["spec_verify_ct"]
    assert_same_answers([stays.result()], expected[4:5], tolerance=1e-4)
    assert statistics(stays.result(), "dense_reason") == "asked"
    assert cached(again[-1]) >= 512  # prompts come back from the cache rank
    wait_until(lambda: all_is_free(server))


@once
def test_sampled_answers_depend_on_the_seed_alone(server: Server) -> None:
    """Not on where they are verified, nor on what is beside them."""
    options = {"temperature": 1.2, "top_k": 20, "top_p": 0.95, "sampling_seed": 2**40 + 7}
    sampling: dict[str, Any] = {"sampling_params": options}
    alone = server.generate(PROMPTS[4], NEW_TOKENS, **sampling)
    beside = server.generate_all(PROMPTS[3:], NEW_TOKENS, **sampling)[1]
    stays = server.generate(
        PROMPTS[4], NEW_TOKENS, sampling_params={**options, **DENSE["sampling_params"]}
    )
    assert statistics(alone, "dense_reason") is None
    assert statistics(stays, "sparse_steps") == 0
    assert alone["output_ids"] == beside["output_ids"] == stays["output_ids"]


@once
def test_sparse_requests_go_on_where_a_batch_has_no_drafts(
    server: Server, plain_server: Server
) -> None:
    """A request with a penalty decodes beside them, token by token, and stays in the pool."""
    prompts, (other,) = PROMPTS[3:5], random_prompts([200], seed=15)
    expected = plain_server.generate_all(prompts, 200, return_logprob=True)
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(server.generate_all, prompts, 200, return_logprob=True)
        server.wait_for(30, sparse_requests=2)
        penalized = server.generate(other, 20, sampling_params={"frequency_penalty": 1.5})
        found = answers.result()
    assert_same_answers(found, expected, tolerance=1e-4)
    for answer in found:
        assert answer["meta_info"]["spec_verify_ct"] > 20 + 10  # 20 of them had one token
        assert answer["meta_info"]["spec_num_correct_drafts"] > 10
    assert penalized["meta_info"]["spec_num_correct_drafts"] == 0
    assert statistics(penalized, "sparse_steps") == 0


@once
def test_more_is_served_than_the_pool_holds(server: Server, plain_server: Server) -> None:
    """Eight requests of 410 tokens, of which each has a fraction in the pool."""
    prompts = random_prompts([330] * 8, seed=9)
    expected = plain_server.generate_all(prompts, NEW_TOKENS)
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(server.generate_all, prompts, NEW_TOKENS)
        server.wait_for(60, sparse_requests=8)
        wait_until(lambda: server.cache_rank()["pool_free_tokens"] > POOL - 8 * 150, 60)
        for answer, plain in zip(answers.result(), expected, strict=True):
            assert answer["output_ids"] == plain["output_ids"]
            assert statistics(answer, "retractions") == 0
    server.wait_for(10, sparse_requests=0)
    wait_until(lambda: all_is_free(server))


@once
def test_requests_that_end_early_leave_nothing(server: Server, plain_server: Server) -> None:
    """They stop in the middle of a round, are aborted, or reach the end of the context."""
    text = plain_server.generate(PROMPTS[4], NEW_TOKENS)["output_ids"]
    stop = next(token for token in text[30:] if token not in text[:30])
    options = {"sampling_params": {"stop_token_ids": [stop], "ignore_eos": False}}
    long, short = random_prompts([1990, 150], seed=10)
    expected = plain_server.generate(long, 50)["output_ids"]
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(server.generate, short, 1500, rid="to be aborted")
        server.wait_for(30, sparse_requests=1)
        ends = pool.submit(server.generate, long, 50)
        stopped = server.generate(PROMPTS[4], NEW_TOKENS, **options)
        server.post("/abort_request", {"rid": "to be aborted"})
        lost.result()
    assert stopped["output_ids"] == text[: text.index(stop) + 1]
    assert ends.result()["output_ids"] == expected
    server.wait_for(10, sparse_requests=0)
    wait_until(lambda: all_is_free(server))


@once
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_cache_rank_costs_no_token(server: Server, plain_server: Server, sent: int) -> None:
    """It is lost in the middle of rounds. What was sparse is computed again, and sparse again."""
    prompts, starts = [*PROMPTS[2:5], PROMPTS[0]], server.wait_for(60, up=True)["starts"]
    expected = plain_server.generate_all(prompts, 200, return_logprob=True)
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(server.generate_all, prompts, 200, return_logprob=True)
        server.wait_for(30, sparse_requests=3)
        server.signal_cache_rank(sent)
        found = answers.result()
    assert_same_answers(found, expected, tolerance=1e-4)
    assert sum(statistics(answer, "retractions") for answer in found) >= 3
    assert sum(statistics(answer, "stale_steps") for answer in found) >= 3
    server.wait_for(60, up=True, starts=starts + 1)
    (after,) = server.generate_all(prompts[-2:-1], NEW_TOKENS)
    assert after["output_ids"] == found[-2]["output_ids"][:NEW_TOKENS]
    assert statistics(after, "dense_reason") is None
    wait_until(lambda: all_is_free(server))


@pytest.fixture(scope="module", params=["quantspec", "lynx"])
def coded_server(
    request: pytest.FixtureRequest, random_model: Callable[..., Path]
) -> Iterator[Server]:
    """Tokens are held as codes of 8 bits; of quantspec drafts are selected by the upper 4."""
    chunks = '{"layers_per_group":2,"query_window":4,"bulk_chunk_tokens":256}'
    flags = [*FLAGS, "--kv-residency", request.param, "--cache-rank-config", chunks]
    with serve([*flags, "--model-path", str(random_model())], STRICT_POOL) as running:
        yield running


def test_codes_of_8_bits_verify_almost_as_plain_sglang(
    coded_server: Server, plain_server: Server
) -> None:
    """Log-probabilities tell that codes were read, and that it was both planes of them."""
    compared, differences = 0, []
    for prompt in random_prompts([400, 700, 1000], seed=21):
        found = coded_server.generate(prompt, 100, **LIKELY_TOKENS)
        plain = plain_server.generate(prompt, 100, **LIKELY_TOKENS)
        assert statistics(found, "dense_reason") is None
        same = same_but_for_rounding(found, plain)
        compared += same
        ours, theirs = log_probabilities(found)[:same], log_probabilities(plain)[:same]
        differences.append(difference(ours, theirs))
    assert compared > 100
    assert 1e-5 < max(differences) < 0.1
    wait_until(lambda: all_is_free(coded_server))


def test_pages_of_prompts_travel_as_codes(coded_server: Server) -> None:
    """A prompt that is shorter than a chunk travels as it is."""
    bytes_of_token = []
    for prompt in random_prompts([200, 1000], seed=22):
        before = coded_server.cache_rank()["bulk_bytes"]
        coded_server.generate(prompt, NEW_TOKENS)
        tokens = len(prompt) + NEW_TOKENS
        bytes_of_token.append((coded_server.cache_rank()["bulk_bytes"] - before) / tokens)
    assert 0.4 < bytes_of_token[1] / bytes_of_token[0] < 0.75
    wait_until(lambda: all_is_free(coded_server))
