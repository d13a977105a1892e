"""What one server prefills and another decodes is what a single server answers."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests
from disaggregated import Half, ask_both
from waiting import wait_until
from workload import (
    DENSE,
    assert_same_answers,
    log_probabilities,
    random_prompts,
    sparse_steps,
)

from scripts.shared.serving import PLAIN, Server, ServerError

pytestmark = [pytest.mark.xdist_group("plain server"), pytest.mark.releases]

PROMPTS = random_prompts([700, 30, 512, 257, 110])
"""Of some and of no complete pages; the longest are prefilled in six chunks."""

FEW = (
    "--dtype float32 --sink-tokens 4 --recent-tokens 8 --sparse-threshold 100 --sparse-budget 40 "
    "--max-total-tokens 2500"
).split()
"""Another sketch selects other tokens, and gives another answer."""

SLOW = {"CACHE_RANK_LINK_GBPS": "0.002"}
"""700 tokens take 6 seconds."""


class Servers(NamedTuple):
    """Two servers that prefill, two that decode, and one that does both inline."""

    fast: Half
    slow: Half
    inline: Half
    plain: Half
    whole: Server


@pytest.fixture(scope="module")
def servers(random_model: Callable[..., Path], cache_home: Path) -> Iterator[Servers]:
    of_model = ["--model-path", str(random_model()), "--skip-tokenizer-init"]
    plain, few = [*PLAIN, *of_model], [*FEW, *of_model]
    chunks = ["--chunked-prefill-size", "128"]
    fitted = {"XDG_CACHE_HOME": str(cache_home)}
    with contextlib.ExitStack() as stack:
        started = Servers(
            Half("prefill", [*plain, *chunks]),
            Half("prefill", [*plain, *chunks], SLOW),
            Half("decode", few, fitted),
            Half("decode", plain),
            Server(few, fitted),
        )
        for server in started:
            stack.callback(server.stop)
        for server in started:
            server.wait_ready()
        yield started


def rows_are_free(inline: Half) -> bool:
    return bool(inline.cache_rank()["pool_free_tokens"] == 2500)


def test_answers_equal_those_of_one_server(servers: Servers, plain_server: Server) -> None:
    """Sparse ones one at a time: the rounding of others in a batch can change a selection."""
    fast, _, inline, plain, whole = servers
    wanted = {"return_logprob": True}
    expected = plain_server.generate_all(PROMPTS, 40, **wanted)
    assert_same_answers(ask_both(fast, plain, PROMPTS, 40, **wanted), expected, 1e-4)
    expected = [whole.generate_all([prompt], 40, **wanted)[0] for prompt in PROMPTS]
    answers = [ask_both(fast, inline, [prompt], 40, **wanted)[0] for prompt in PROMPTS]
    assert_same_answers(answers, expected, 1e-4)
    assert [sparse_steps(answer) for answer in answers] == [39, 0, 39, 39, 39]
    dense = ask_both(fast, inline, PROMPTS, 40, **wanted, **DENSE)
    assert_same_answers(dense, plain_server.generate_all(PROMPTS, 40, **wanted), 1e-4)
    assert dense != answers
    assert rows_are_free(inline)


def test_a_request_chooses_its_codes(servers: Servers) -> None:
    fast, _, inline, plain, _ = servers
    answers = {}
    for codes in ("bf16", "quantspec", "hack"):
        params = {"sampling_params": {"custom_params": {"wire_codes": codes}}}
        (answers[codes],) = ask_both(fast, plain, PROMPTS[:1], 8, return_logprob=True, **params)
    exact, *rounded = (log_probabilities(answers[codes]) for codes in answers)
    assert all(found[0] == exact[0] != 0 and found[1:] != exact[1:] for found in rounded)
    wanted = {"custom_params": {"wire_codes": "zip"}}
    with pytest.raises(ServerError, match="wire_codes must be one of bf16, lynx, quantspec, hack"):
        inline.generate(PROMPTS[0], 8, sampling_params=wanted)


def test_servers_that_are_asked_for_different_prompts_say_so(servers: Servers) -> None:
    half = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.fast.bootstrap_port}
    half["bootstrap_room"] = 1 << 40
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(servers.fast.generate, PROMPTS[1], 4, **half)
        with pytest.raises(ServerError, match="closed the connection"):
            servers.inline.generate(PROMPTS[4], 4, **half)
        with pytest.raises(ServerError, match="has 30 tokens, and 110 are awaited"):
            other.result()
    wait_until(lambda: rows_are_free(servers.inline), 5)


@pytest.mark.parametrize(
    "wrong", [{"bootstrap_host": None}, {"bootstrap_room": 0}, {"top_logprobs_num": 200}], ids=str
)
def test_requests_that_would_end_or_stall_a_half_are_refused(
    servers: Servers, wrong: dict[str, Any]
) -> None:
    half = {"bootstrap_host": "127.0.0.1", "bootstrap_port": servers.fast.bootstrap_port}
    half |= {"bootstrap_room": 1 << 41, "return_logprob": True}
    with pytest.raises(ServerError, match=f"answers 400: .*{next(iter(wrong))}"):
        servers.plain.generate(PROMPTS[1], 4, **half | wrong)


def test_requests_that_are_aborted_leave_nothing(servers: Servers) -> None:
    """Some are on their way, and some still wait for rows."""
    _, slow, inline, *_ = servers
    with ThreadPoolExecutor(4) as pool:
        under_way = [pool.submit(ask_both, slow, inline, PROMPTS[:1], 8) for _ in range(4)]
        wait_until(lambda: not rows_are_free(inline), 10)

        def are_aborted() -> bool:
            inline.post("/abort_request", {"abort_all": True})  # also those that come only now
            return all(each.done() for each in under_way)

        wait_until(are_aborted, 10)
        for each in under_way:
            with pytest.raises(ServerError):
                each.result()
    wait_until(lambda: rows_are_free(inline), 5)
    (answer,) = ask_both(slow, inline, PROMPTS[4:], 8)
    assert sparse_steps(answer) == 7


def test_a_prefill_server_that_dies_takes_its_requests_only(servers: Servers) -> None:
    fast, slow, inline, *_ = servers
    with ThreadPoolExecutor(2) as pool:
        longer = pool.submit(ask_both, fast, inline, PROMPTS[4:], 400)
        dying = pool.submit(ask_both, slow, inline, PROMPTS[:2], 8)
        wait_until(lambda: inline.cache_rank()["pool_free_tokens"] < 1700, 10)
        since = time.monotonic()
        for process in psutil.Process(slow.process.pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        slow.stop()
        with pytest.raises((ServerError, requests.RequestException)):
            dying.result()
        assert time.monotonic() - since < 8
        assert len(longer.result()[0]["output_ids"]) == 400
    wait_until(lambda: rows_are_free(inline), 5)
    (expected,) = servers.whole.generate_all(PROMPTS[:1], 20)
    assert ask_both(fast, inline, PROMPTS[:1], 20)[0]["output_ids"] == expected["output_ids"]
