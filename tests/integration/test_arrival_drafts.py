"""A request drafts while residuals of its prompt come, and nobody sees a draft that is wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from disaggregated import Half, ask_both, body_for_both
from waiting import wait_until
from workload import random_prompts, streamed

from cache_rank.channels.rate import LINK_GBPS_VARIABLE
from scripts.shared.serving import PLAIN, ServerError
from sglang_ext.disaggregation.arrival_drafts import AT_ONCE
from sglang_ext.flags import MOST_WIRE_DRAFTS

pytestmark = [pytest.mark.xdist_group("plain server"), pytest.mark.releases]

PROMPTS = random_prompts([1100, 700, 530, 300], seed=5)
ROWS = 8000


class Servers(NamedTuple):
    slow: Half
    inline: Half


def params(drafts: bool, **more: Any) -> dict[str, Any]:
    custom = {"wire_codes": "lynx", "wire_drafts": drafts, "cache_rank": False}
    return {"sampling_params": {"custom_params": custom, **more}}


@pytest.fixture(scope="module")
def servers(random_model: Callable[..., Path], cache_home: Path) -> Iterator[Servers]:
    of_model = ["--model-path", str(random_model()), "--skip-tokenizer-init"]
    flags = (
        f"--dtype float32 --max-total-tokens {ROWS} --wire-drafts {MOST_WIRE_DRAFTS} "
        "--sparse-threshold 1000 --sparse-budget 40 --sink-tokens 4 --recent-tokens 8"
    ).split()
    with contextlib.ExitStack() as stack:
        started = Servers(
            Half("prefill", [*PLAIN, *of_model], {LINK_GBPS_VARIABLE: "0.0015"}),
            Half("decode", [*of_model, *flags], {"XDG_CACHE_HOME": str(cache_home)}),
        )
        for server in started:
            stack.callback(server.stop)
        for server in started:
            server.wait_ready()
        yield started


def nothing_is_left(servers: Servers) -> None:
    wait_until(lambda: servers.inline.cache_rank()["pool_free_tokens"] == ROWS, 8)


def drafted(answer: Any) -> tuple[int, int]:
    """How many tokens a request has drafted, and how many of them stand."""
    found = answer["meta_info"]["cache_rank"]
    return found["wire_drafts"], found["wire_drafts_accepted"]


def test_answers_are_those_of_whole_prompts(servers: Servers) -> None:
    """Of requests that come one by one, and at once: the fifth has to wait for all of its K and V.

    The model's weights are random, and residuals change its mind.
    """
    prompts = [*PROMPTS, *random_prompts([270], seed=6)]
    whole = [ask_both(*servers, [one], 90, **params(False))[0] for one in prompts]
    assert {drafted(one) for one in whole} == {(0, 0)}
    alone = [ask_both(*servers, [one], 90, **params(True))[0] for one in prompts]
    at_once = ask_both(*servers, prompts, 90, **params(True))
    for answers in (alone, at_once):
        assert [one["output_ids"] for one in answers] == [one["output_ids"] for one in whole]
    made, right = map(sum, zip(*map(drafted, alone), strict=True))  # as many as there is time for
    assert 0 < right < made
    assert [drafted(one)[0] for one in at_once].count(0) >= len(prompts) - AT_ONCE
    nothing_is_left(servers)


def test_drafts_attend_to_everything_beside_a_sparse_request(servers: Servers) -> None:
    """Nor does a request draft that is sparse in every step."""
    (whole,) = ask_both(*servers, PROMPTS[1:2], 90, **params(False))
    sparse = {"sampling_params": {"custom_params": {"wire_codes": "lynx"}}}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask_both, *servers, PROMPTS[:1], 900, **sparse)
        wait_until(lambda: servers.inline.cache_rank()["sparse_requests"] == 1, 20)
        (answer,) = ask_both(*servers, PROMPTS[1:2], 90, **params(True))
        assert drafted(other.result()[0]) == (0, 0)
    assert answer["output_ids"] == whole["output_ids"]
    assert drafted(answer)[0] > 0
    nearly_sparse = random_prompts([980], seed=9)
    (answer,) = ask_both(*servers, nearly_sparse, 60, **sparse)
    assert 0 < drafted(answer)[0] <= 1000 - 980 - 2


def test_an_answer_may_end_among_its_drafts(servers: Servers) -> None:
    (whole,) = ask_both(*servers, PROMPTS[2:3], 20, **params(False))
    tokens = whole["output_ids"]
    for count in (2, 3, 6):
        (answer,) = ask_both(*servers, PROMPTS[2:3], count, **params(True))
        assert answer["output_ids"] == tokens[:count]
        assert drafted(answer)[0] <= count - 2
    (answer,) = ask_both(*servers, PROMPTS[2:3], 1, **params(True))
    assert answer["output_ids"] == tokens[:1]
    stop = params(True, stop_token_ids=[tokens[2]], ignore_eos=False)
    (answer,) = ask_both(*servers, PROMPTS[2:3], 20, **stop)
    assert answer["output_ids"] == tokens[: tokens.index(tokens[2]) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[2]}
    nothing_is_left(servers)


def test_clients_see_the_first_token_early_and_no_draft(servers: Servers) -> None:
    (whole,) = ask_both(*servers, PROMPTS[:1], 90, **params(False))
    body = body_for_both(servers.slow, PROMPTS[0], 90)
    body["sampling_params"] |= params(True)["sampling_params"]
    with ThreadPoolExecutor(1) as pool:
        prefilled = pool.submit(servers.slow.post, "/generate", body)
        began, seen = time.monotonic(), []
        for event in streamed(servers.inline, body):
            seen.append((time.monotonic() - began, event["output_ids"]))
        prefilled.result()
    assert [tokens for _, tokens in seen][-1] == whole["output_ids"]
    assert all(tokens == whole["output_ids"][: len(tokens)] for _, tokens in seen)
    (first, tokens), (second, more) = seen[0], next(one for one in seen if len(one[1]) > 1)
    assert len(tokens) == 1
    assert len(more) == 2 + drafted({"meta_info": event["meta_info"]})[1]
    assert first < second / 2


@pytest.mark.parametrize("how", [{"temperature": 0.5}, {"temperature": 1.0, "top_k": 4}])
def test_tokens_may_be_drawn_at_random(servers: Servers, how: dict[str, Any]) -> None:
    prompts = random_prompts([520] * AT_ONCE, seed=8)
    answers = ask_both(*servers, prompts, 70, **params(True, **how))
    assert all(len(one["output_ids"]) == 70 for one in answers)
    assert any(made > 0 for made, _ in map(drafted, answers))


@pytest.mark.parametrize(
    "wish",
    [
        {"return_logprob": True},
        {"sampling_params": {"repetition_penalty": 1.1}},
        {"sampling_params": {"frequency_penalty": 0.5}},
    ],
)
def test_what_depends_on_more_than_tokens_waits(servers: Servers, wish: dict[str, Any]) -> None:
    given = params(True, **wish.get("sampling_params", {}))
    for prompt in (PROMPTS[0], PROMPTS[3]):
        (answer,) = ask_both(*servers, [prompt], 8, **{**wish, **given})
        assert drafted(answer) == (0, 0)


def test_a_request_that_is_aborted_leaves_nothing(servers: Servers) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_both, *servers, PROMPTS[:1], 90, **params(True))
        # Rows of drafts are taken when all anchors are there.
        taken = ROWS - len(PROMPTS[0]) - MOST_WIRE_DRAFTS
        wait_until(lambda: servers.inline.cache_rank()["pool_free_tokens"] < taken, 10)
        for half in servers:
            half.post("/abort_request", {"abort_all": True})
        with pytest.raises((ServerError, AssertionError)):
            asked.result(20)
    nothing_is_left(servers)


def test_a_prefill_server_may_die_before_residuals_are_there(servers: Servers) -> None:
    """The last test: its client has seen the first token, and reads an error."""
    body = body_for_both(servers.slow, PROMPTS[0], 90)
    body["sampling_params"] |= params(True)["sampling_params"]
    with ThreadPoolExecutor(2) as pool:
        pool.submit(servers.slow.post, "/generate", body)
        events = pool.submit(lambda: [*streamed(servers.inline, body)])
        taken = ROWS - len(PROMPTS[0]) - MOST_WIRE_DRAFTS
        wait_until(lambda: servers.inline.cache_rank()["pool_free_tokens"] < taken, 10)
        for process in psutil.Process(servers.slow.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        servers.slow.stop()
        *before, last = events.result(20)
    assert [len(one["output_ids"]) for one in before] == [1] * len(before)
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    nothing_is_left(servers)
