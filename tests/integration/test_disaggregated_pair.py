"""A pair of ranks decodes what another server has prefilled, and loses its cache rank."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from disaggregated import Half, ask_both, body_for_both
from waiting import wait_until
from workload import DENSE, assert_same_answers, random_prompts, sparse_steps, streamed

from cache_rank.channels.rate import LINK_GBPS_VARIABLE
from cache_rank.pages import PAGE_TOKENS
from scripts.shared.serving import PLAIN, Server, ServerError
from sglang_ext.disaggregation.hooks import GONE
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

pytestmark = [pytest.mark.xdist_group("plain server"), pytest.mark.releases]

PROMPTS = random_prompts([700, 30, 512, 257, 110])
LONG, SHORT = PROMPTS[0], PROMPTS[1]

CHUNKS = ["--chunked-prefill-size", "128"]

PAIR = (
    "--cache-rank-gpus 1 --kv-residency bf16 --dtype float32 --sink-tokens 4 --recent-tokens 8 "
    "--sparse-threshold 100 --max-sparse-requests 8 --max-total-tokens 2500 "
    "--cache-rank-timeout 8 --num-reserved-decode-tokens 8 "
    '--cache-rank-config {"layers_per_group":2,"query_window":4,"bulk_chunk_tokens":1024}'
).split()

EVERYTHING = ["--sparse-budget", "1024"]
"""Sparse steps attend to what dense ones do, so that plain SGLang checks them."""

FEW = "--inference-kv working-set --sparse-budget 40 --max-swap-tokens 40".split()

CODES: dict[str, Any] = {"sampling_params": {"custom_params": {"wire_codes": "quantspec"}}}
"""A request with these options travels as codes."""

SLOW = {LINK_GBPS_VARIABLE: "0.006"}
"""A page of 256 tokens takes two thirds of a second."""

CONFIDENT = {"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1000"}
"""A server goes on to believe that a prefill server is where it was."""


class Servers(NamedTuple):
    """One server prefills, two pairs decode, and one pair does both."""

    prefill: Half
    full: Half
    working_set: Half
    whole: Server


@pytest.fixture(scope="module")
def servers(random_model: Callable[..., Path]) -> Iterator[Servers]:
    of_model = ["--model-path", str(random_model()), "--skip-tokenizer-init"]
    pair = [*PAIR, *of_model]
    with contextlib.ExitStack() as stack:
        started = Servers(
            Half("prefill", [*PLAIN, *of_model, *CHUNKS]),
            Half("decode", [*pair, *EVERYTHING], {ALLOW_LARGE_BUDGET_VARIABLE: "1", **CONFIDENT}),
            Half("decode", [*pair, *FEW]),
            Server([*pair, *FEW, *CHUNKS]),
        )
        for server in started:
            stack.callback(server.stop)
        for server in started:
            server.wait_ready()
        yield started


def wait_until_nothing_is_left(server: Server) -> None:
    """Until there is a cache rank without sequences, and all rows are free."""
    server.wait_for(60, up=True, sequences=0, sparse_requests=0, pool_free_tokens=2500)


def kill_cache_rank(server: Server, sparse: int) -> None:
    """Kill it once so many requests are sparse, and a step of theirs waits for answers."""
    wait_until(lambda: server.cache_rank()["sparse_requests"] >= sparse, 60)
    steps = server.cache_rank()["steps"]
    wait_until(lambda: server.cache_rank()["steps"] >= steps + 20, 60)
    server.signal_cache_rank(signal.SIGSTOP)
    time.sleep(0.5)
    server.signal_cache_rank(signal.SIGKILL)


@contextlib.contextmanager
def running(half: Half) -> Iterator[Half]:
    try:
        half.wait_ready()
        yield half
    finally:
        half.stop()


def retractions(answer: Any) -> int:
    """How often a request was retracted."""
    return int(answer["meta_info"]["num_retractions"])


def test_answers_equal_those_of_the_same_pair(servers: Servers) -> None:
    """One at a time, because the rounding of others in a batch can change a selection.

    What fills pages is shipped before it decodes, and is sparse a step earlier.
    """
    prefill, _, working_set, whole = servers
    for prompt in PROMPTS:
        wanted = {"return_logprob": True}
        expected = whole.generate_all([prompt], 40, **wanted)
        answers = ask_both(prefill, working_set, [prompt], 40, **wanted)
        earlier = len(prompt) % PAGE_TOKENS == 0
        if not earlier:
            assert_same_answers(answers, expected, 1e-4)
        assert sparse_steps(answers[0]) == sparse_steps(expected[0]) + earlier
        assert (sparse_steps(answers[0]) > 25) == (prompt is not SHORT)
    wait_until_nothing_is_left(working_set)


def test_what_is_retracted_is_brought_back(servers: Servers, plain_server: Server) -> None:
    """The pool has room for little more than half of what is written."""
    prefill, full, *_ = servers
    wanted = {"return_logprob": True}
    prompts = [*PROMPTS, *random_prompts([110] * 3, seed=1)]
    expected = plain_server.generate_all(prompts, 300, **wanted)
    answers = ask_both(prefill, full, prompts, 300, **wanted)
    assert_same_answers(answers, expected, 1e-4)
    assert sum(map(retractions, answers)) > 0
    assert all((sparse_steps(answer) > 20) for answer in answers if answer is not answers[1])
    wait_until_nothing_is_left(full)


def test_requests_go_on_without_their_cache_rank(servers: Servers, plain_server: Server) -> None:
    """Those that made a step without their answers are retracted, and brought back."""
    prefill, full, *_ = servers
    losses = full.cache_rank()["losses"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_both, prefill, full, PROMPTS, 200)
        kill_cache_rank(full, sparse=4)
        answers = asked.result()
    expected = plain_server.generate_all(PROMPTS, 200)
    assert [each["output_ids"] for each in answers] == [each["output_ids"] for each in expected]
    ours = [answer["meta_info"]["cache_rank"] for answer in answers]
    assert sum(each["retractions"] for each in ours) > 0
    assert full.cache_rank()["losses"] == losses + 1
    wait_until_nothing_is_left(full)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_request_whose_rows_are_evicted_ends_with_its_cache_rank(
    streams: bool, servers: Servers, plain_server: Server
) -> None:
    prefill, _, working_set, _ = servers
    with ThreadPoolExecutor(3) as pool:
        shorter = pool.submit(ask_both, prefill, working_set, [SHORT], 60)
        if streams:
            body = body_for_both(prefill, LONG, 1200)
            pool.submit(prefill.post, "/generate", body)
            ending = pool.submit(lambda: [*streamed(working_set, body)][-1])
        else:
            ending = pool.submit(ask_both, prefill, working_set, [LONG], 1200)
        kill_cache_rank(working_set, sparse=1)
        if streams:
            reason = ending.result(20)["meta_info"]["finish_reason"]
            found = reason["type"], reason["status_code"], reason["message"]
            assert found == ("abort", 503, GONE)
        else:
            with pytest.raises(ServerError, match=f"/generate answers 503.*{GONE}"):
                ending.result(20)
        (next_one,) = ask_both(prefill, working_set, [LONG], 20)
        expected = plain_server.generate_all([SHORT], 60)[0]["output_ids"]
        assert shorter.result()[0]["output_ids"] == expected
    assert len(next_one["output_ids"]) == 20
    wait_until_nothing_is_left(working_set)


def test_what_has_left_the_pool_is_retracted_last(servers: Servers, plain_server: Server) -> None:
    """It would end, so SGLang takes the rows of a dense request that has written more."""
    prefill, _, working_set, whole = servers
    long_ones, later = random_prompts([900, 800], seed=7), PROMPTS[3:4]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_both, prefill, working_set, long_ones, 700, **DENSE)
        wait_until(lambda: working_set.cache_rank()["pool_free_tokens"] < 790, 20)
        (answer,) = ask_both(prefill, working_set, later, 500)
        dense = asked.result()
    (expected,) = whole.generate_all(later, 500)
    assert (answer["output_ids"], retractions(answer)) == (expected["output_ids"], 0)
    expected = plain_server.generate_all(long_ones, 700)
    assert [each["output_ids"] for each in dense] == [each["output_ids"] for each in expected]
    assert sum(map(retractions, dense)) > 0
    wait_until_nothing_is_left(working_set)


def test_a_prompt_goes_on_as_the_codes_in_which_it_comes(
    servers: Servers, random_model: Callable[..., Path]
) -> None:
    """If the cache rank holds such codes. Pages that it has of another request need not go on."""
    flags = [*PAIR, *FEW, "--model-path", str(random_model()), "--skip-tokenizer-init"]
    counters = ("tokens_passed_on", "tokens_adopted", "bulk_bytes")
    with running(Half("decode", [*flags, "--kv-residency", "quantspec"])) as decode:

        def ask(prompt: list[int], **options: Any) -> tuple[list[int], list[int]]:
            before = decode.cache_rank()
            (answer,) = ask_both(servers.prefill, decode, [prompt], 40, **options)
            assert sparse_steps(answer) > 25
            after = decode.cache_rank()
            return answer["output_ids"], [after[name] - before[name] for name in counters]

        other = random_prompts([700], seed=3)[0]
        answer, (passed_on, adopted, as_codes) = ask(LONG, **CODES)
        assert (passed_on, adopted) == (2 * PAGE_TOKENS, 0)
        again, (passed_on, adopted, nearly_none) = ask(LONG, **CODES)
        assert again == answer
        assert (passed_on, adopted) == (0, 2 * PAGE_TOKENS)
        assert nearly_none < 0.8 * as_codes
        _, (passed_on, adopted, encoded_here) = ask(other)
        assert (passed_on, adopted, encoded_here) == (0, 0, as_codes)
        wait_until_nothing_is_left(decode)


@pytest.fixture(scope="module")
def slow_prefill(servers: Servers, random_model: Callable[..., Path]) -> Iterator[Half]:
    flags = [*PLAIN, "--model-path", str(random_model()), "--skip-tokenizer-init", *CHUNKS]
    with running(Half("prefill", flags, SLOW)) as prefill:
        yield prefill


@contextlib.contextmanager
def coming_in_part(prefill: Half, decode: Half, prompt: list[int]) -> Iterator[Future[Any]]:
    """Ask for an answer; some pages of its prompt have come."""
    before = decode.cache_rank()["bulk_bytes"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_both, prefill, decode, [prompt], 40, return_logprob=True)
        wait_until(lambda: decode.cache_rank()["bulk_bytes"] > before, 20)
        assert decode.cache_rank()["sparse_requests"] == 0
        yield asked


def test_a_prompt_may_end_or_lose_its_cache_rank_while_it_comes(
    servers: Servers, plain_server: Server, slow_prefill: Half
) -> None:
    (prompt,), full = random_prompts([950], seed=4), servers.full
    with coming_in_part(slow_prefill, full, prompt) as asked:
        for half in (full, slow_prefill):
            half.post("/abort_request", {"abort_all": True})
        with pytest.raises((ServerError, AssertionError)):
            asked.result(20)
    wait_until_nothing_is_left(full)
    losses = full.cache_rank()["losses"]
    with coming_in_part(slow_prefill, full, prompt) as asked:
        full.signal_cache_rank(signal.SIGKILL)
        answers = asked.result(30)
    assert_same_answers(answers, plain_server.generate_all([prompt], 40, return_logprob=True))
    assert full.cache_rank()["losses"] == losses + 1
    wait_until_nothing_is_left(full)


def test_a_prompt_goes_on_to_come_while_generation_is_paused(
    servers: Servers, plain_server: Server, slow_prefill: Half
) -> None:
    (prompt,), full = random_prompts([950], seed=5), servers.full
    with coming_in_part(slow_prefill, full, prompt) as asked:
        full.post("/pause_generation", {"mode": "in_place"}).raise_for_status()
        before = full.cache_rank()["bulk_bytes"]
        try:
            wait_until(lambda: full.cache_rank()["bulk_bytes"] > before, 20)
        finally:
            full.post("/continue_generation", {}).raise_for_status()
        answers = asked.result(30)
    assert_same_answers(answers, plain_server.generate_all([prompt], 40, return_logprob=True))
    wait_until_nothing_is_left(full)


def test_a_prefill_server_is_found_again(
    servers: Servers, plain_server: Server, random_model: Callable[..., Path]
) -> None:
    """The last test of these servers: the first request after a restart is served."""
    prefill, full, *_ = servers
    prefill.stop()
    flags = [*PLAIN, "--model-path", str(random_model()), "--skip-tokenizer-init", *CHUNKS]
    again = Half("prefill", flags, bootstrap_port=prefill.bootstrap_port)
    try:
        again.wait_ready()
        (answer,) = ask_both(again, full, [LONG], 20)
    finally:
        again.stop()
    assert answer["output_ids"] == plain_server.generate_all([LONG], 20)[0]["output_ids"]
