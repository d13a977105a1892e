"""Selection in SGLang's own process, with a budget that covers everything, is dense decode."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until
from workload import (
    DENSE,
    assert_same_answers,
    log_probabilities,
    random_prompts,
    select_everything,
    streamed,
)

from scripts.shared.serving import Server

pytestmark = pytest.mark.xdist_group("plain server")

THRESHOLD = 100
NEW_TOKENS = 60
# Below, just below, at and above the threshold; the last two are prefilled in chunks of 128.
PROMPTS = random_prompts([30, 60, 98, 99, 100, 101, 150, 228, 300])


@pytest.fixture(autouse=True)
def _empty_tree(inline_server: Server) -> None:
    inline_server.flush_cache()


def statistics(response: Any) -> dict[str, Any]:
    return dict(response["meta_info"]["cache_rank"])


def steps_from(prompt: list[int], new_tokens: int) -> int:
    """How many decode steps of a request are at or beyond the threshold.

    The prefill gives the first token; the step that is given the n-th has n tokens and the prompt.
    """
    return sum(len(prompt) + n >= THRESHOLD for n in range(1, new_tokens))


def assert_as_plain(responses: list[Any], expected: list[Any]) -> None:
    assert_same_answers(responses, expected, tolerance=1e-4)


def test_answers_and_log_probabilities_equal_plain_sglang(
    inline_server: Server, plain_server: Server
) -> None:
    for prompts in (PROMPTS, PROMPTS[3:4]):
        expected = plain_server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
        responses = inline_server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
        assert_as_plain(responses, expected)
        for prompt, response in zip(prompts, responses, strict=True):
            found = statistics(response)
            assert found.pop("sparse_steps") == steps_from(prompt, NEW_TOKENS)
            turns_sparse = len(prompt) + NEW_TOKENS > THRESHOLD
            assert found.pop("dense_reason") == (None if turns_sparse else "below_threshold")
            attended = len(prompt) + NEW_TOKENS - 1 if turns_sparse else 0
            assert found.pop("attended_tokens") == attended  # the budget covers all
            assert set(found.values()) == {0}  # there is no second process


def test_steps_without_sparse_requests_are_sglangs_own(
    inline_server: Server, plain_server: Server
) -> None:
    """Bit for bit: kernels of ours would round differently."""
    for prompt in PROMPTS[:2]:
        count = THRESHOLD - len(prompt)
        response, plain = (
            server.generate(prompt, count, return_logprob=True)
            for server in (inline_server, plain_server)
        )
        assert log_probabilities(response) == log_probabilities(plain)


def test_requests_that_ask_to_stay_dense_share_a_batch_with_others(
    inline_server: Server, plain_server: Server
) -> None:
    expected = plain_server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    parameters = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    asked = [number % 2 == 0 for number in range(len(PROMPTS))]
    body = {
        "input_ids": PROMPTS,
        "sampling_params": [
            parameters | (DENSE["sampling_params"] if dense else {}) for dense in asked
        ],
        "return_logprob": True,
    }
    responses = inline_server.post("/generate", body).json()
    assert_as_plain(responses, expected)
    for prompt, dense, response in zip(PROMPTS, asked, responses, strict=True):
        found = statistics(response)
        assert found["sparse_steps"] == (0 if dense else steps_from(prompt, NEW_TOKENS))
        if dense:
            is_long = len(prompt) + NEW_TOKENS > THRESHOLD
            assert found["dense_reason"] == ("asked" if is_long else "below_threshold")


def test_a_prompt_of_many_chunks_is_sparse_from_its_first_step(
    inline_server: Server, plain_server: Server
) -> None:
    (prompt,) = random_prompts([1900], seed=1)
    expected = plain_server.generate(prompt, 40, return_logprob=True)
    for known in (0, len(prompt) - 1):  # asked twice, it is found in the tree and equally sparse
        response = inline_server.generate(prompt, 40, return_logprob=True)
        assert response["meta_info"]["cached_tokens"] == known
        assert statistics(response)["sparse_steps"] == 39
        assert_as_plain([response], [expected])


def test_requests_that_wait_for_room_in_the_pool_answer_the_same(
    inline_server: Server, plain_server: Server
) -> None:
    free = inline_server.cache_rank()["pool_free_tokens"]
    prompts = random_prompts([330] * 8, seed=6)  # 8 · 390 tokens, and there is room for 2500
    expected = plain_server.generate_all(prompts, 60, return_logprob=True)
    responses = inline_server.generate_all(prompts, 60, return_logprob=True)
    assert_as_plain(responses, expected)
    assert {statistics(response)["sparse_steps"] for response in responses} == {59}
    state = inline_server.wait_for(10, sparse_requests=0)
    assert state["pool_free_tokens"] == free


def test_a_request_that_is_aborted_leaves_the_pool_whole(inline_server: Server) -> None:
    free = inline_server.cache_rank()["pool_free_tokens"]
    (prompt,) = random_prompts([300], seed=7)
    sampling = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "rid": "gone"}
    chunks = streamed(inline_server, body)
    next(chunks)
    inline_server.wait_for(30, sparse_requests=1)
    inline_server.post("/abort_request", {"rid": "gone"}).raise_for_status()
    assert len(list(chunks)) < 1400
    state = inline_server.wait_for(10, sparse_requests=0)
    assert state["pool_free_tokens"] == free
    assert statistics(inline_server.generate(prompt, 20))["sparse_steps"] == 19


def test_a_pause_changes_no_answer(inline_server: Server, plain_server: Server) -> None:
    prompts = random_prompts([200, 300, 150], seed=8)
    expected = plain_server.generate_all(prompts, 160, return_logprob=True)
    for mode in ("in_place", "retract"):
        inline_server.flush_cache()
        responses = paused(inline_server, prompts, mode)
        assert_as_plain(responses, expected)
        assert all(statistics(one)["sparse_steps"] > 130 for one in responses)


def paused(server: Server, prompts: list[list[int]], mode: str) -> list[Any]:
    """Answers of sparse requests that a pause interrupts."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.generate_all, prompts, 160, return_logprob=True)
        wait_until(lambda: server.cache_rank()["sparse_requests"] == len(prompts), 60)
        server.post("/pause_generation", {"mode": mode}).raise_for_status()
        assert not asked.done()
        server.post("/continue_generation").raise_for_status()
        return asked.result()


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 3},
        {"frequency_penalty": 0.7, "presence_penalty": 0.5, "logit_bias": {"40": 5.0}},
        {"repetition_penalty": 1.3},
    ],
    ids=" ".join,
)
def test_sampling_parameters_do_as_in_plain_sglang(
    inline_server: Server, plain_server: Server, sampling: dict[str, Any]
) -> None:
    (prompt,) = random_prompts([150], seed=10)
    asked = {"return_logprob": True, "sampling_params": sampling}
    given = [server.generate(prompt, 30, **asked) for server in (inline_server, plain_server)]
    found, expected = (one if isinstance(one, list) else [one] for one in given)
    assert len(found) == sampling.get("n", 1)
    assert_as_plain(found, expected)
    assert {statistics(one)["sparse_steps"] for one in found} == {29}


def test_a_session_goes_on_as_in_plain_sglang(inline_server: Server, plain_server: Server) -> None:
    parts = random_prompts([150, 60, 30], seed=11)
    found, expected = (session(server, parts) for server in (inline_server, plain_server))
    assert_as_plain(found, expected)
    assert [statistics(one)["sparse_steps"] for one in found] == [19] * 3


def session(server: Server, parts: list[list[int]]) -> list[Any]:
    """The answers to parts of a conversation, each of which follows the answer before."""
    name = server.post("/open_session", {"capacity_of_str_len": 10000}).json()
    answers: list[Any] = []
    for part in parts:
        before = answers[-1]["meta_info"]["id"] if answers else None
        place = {"id": name, "rid": before, "offset": -1}
        answers.append(server.generate(part, 20, return_logprob=True, session_params=place))
    server.post("/close_session", {"session_id": name})
    return answers


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_tensor_parallel_ranks_select_for_their_own_heads(
    plain_server: Server, random_model: Callable[..., Path], tmp_path: Path
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}",
        "SGLANG_NCCL_SO_PATH": "none",  # where it is installed, it is used on CPUs, too
    }
    expected = plain_server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    with select_everything(random_model(), tmp_path, "--tp-size", "2", **environment) as server:
        found = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    assert_as_plain(found, expected)
    assert statistics(found[-1])["sparse_steps"] == NEW_TOKENS - 1
