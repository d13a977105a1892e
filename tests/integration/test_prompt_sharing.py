"""Prompts that requests have in common are on the cache rank once, and stay there."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from workload import assert_same_answers, random_prompts, sparse_steps

from scripts.shared.serving import Server

pytestmark = pytest.mark.xdist_group("plain server")

PAGE = 256
NEW_TOKENS = 60
PROMPT, QUESTION = random_prompts([700, 25], seed=6)
SHARED = 2 * PAGE


@pytest.fixture(scope="module")
def server(reusing_server: Server) -> Server:
    return reusing_server


@pytest.fixture(autouse=True)
def _empty(server: Server) -> None:
    server.flush_cache()
    server.wait_for(10, tokens_held=0, tokens_kept=0)


class Watch:
    """Reads the state of the cache rank while requests run."""

    def __init__(self, server: Server) -> None:
        self.states: list[dict[str, Any]] = []
        self._server = server
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.states.append(self._server.cache_rank())
            time.sleep(0.05)


def test_samples_of_a_prompt_are_prefilled_once_shipped_once_and_sparse_together(
    server: Server, plain_server: Server
) -> None:
    before = server.cache_rank()
    parameters = {"n": 8, "temperature": 1.0, "max_new_tokens": 80, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": parameters}
    with Watch(server) as watch:
        responses = server.post("/generate", body).json()
    assert len({tuple(response["output_ids"]) for response in responses}) > 1
    assert all(response["meta_info"]["cached_tokens"] >= len(PROMPT) - 1 for response in responses)
    state = server.cache_rank()
    assert state["tokens_adopted"] - before["tokens_adopted"] == 7 * SHARED
    most = max(one["tokens_held"] for one in watch.states)
    assert most <= SHARED + 8 * (len(PROMPT) - SHARED + 81)
    assert max(one["sparse_requests"] for one in watch.states) == 8
    steps = [sparse_steps(response) for response in responses]
    assert min(steps) > 40
    assert max(steps) - min(steps) < 16


def test_the_next_turn_ships_what_is_new(server: Server, plain_server: Server) -> None:
    first = server.generate(PROMPT, NEW_TOKENS, return_logprob=True)
    state = server.wait_for(10, sequences=0, tokens_held=SHARED, tokens_kept=SHARED)
    prompt = PROMPT + first["output_ids"] + QUESTION
    second = server.generate(prompt, NEW_TOKENS, return_logprob=True)
    assert_same_answers(
        [first, second],
        [plain_server.generate(one, NEW_TOKENS, return_logprob=True) for one in (PROMPT, prompt)],
    )
    after = server.wait_for(10, sequences=0, tokens_held=3 * PAGE, tokens_kept=3 * PAGE)
    assert after["tokens_adopted"] - state["tokens_adopted"] == SHARED
    assert after["refused_messages"] == 0
    assert sparse_steps(second) > sparse_steps(first) > 0


def test_requests_that_wait_for_a_prompt_go_on_when_its_request_is_aborted(
    server: Server, plain_server: Server
) -> None:
    prompts = [PROMPT + one for one in random_prompts([5] * 5, seed=7)]
    expected = plain_server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
    server.generate(PROMPT, 1)  # all prefills are short, so that all begin to decode at once
    first = threading.Thread(target=lambda: server.generate(PROMPT, 400, rid="aborted"))
    first.start()
    time.sleep(0.05)
    timer = threading.Timer(0.1, lambda: server.post("/abort_request", {"rid": "aborted"}))
    timer.start()
    responses = server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
    first.join()
    timer.join()
    assert_same_answers(responses, expected)
    assert min(map(sparse_steps, responses)) > 10
    state = server.wait_for(10, sequences=0, tokens_held=SHARED, tokens_kept=SHARED)
    assert state["refused_messages"] == 0
