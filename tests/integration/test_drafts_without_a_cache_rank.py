"""The cache rank is lost while it selects for drafts: they are poor, and answers are the same."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from test_failure import (
    ARGUMENTS,
    CHAINS,
    Streams,
    assert_exact,
    replace_the_cache_rank,
    statistics,
)
from waiting import wait_until

from scripts.shared.serving import Server, serve
from sglang_ext import compat

DRAFTS = (
    "--sparse-threshold 264 --sparse-budget 40 --hysteresis 8 --max-swap-tokens 40 "
    "--dense-layers 0 --query-predictor forecast --forecast-lead 1 "
    "--speculative-algorithm CACHE_RANK"
).split()
if compat.HAS_GRAMMARS_ON_CPUS:
    DRAFTS += ["--grammar-backend", "xgrammar"]

pytestmark = pytest.mark.xdist_group("drafts and losses")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Pools are checked after every batch; K and V are held in the default format."""
    environment = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"}
    with serve([*ARGUMENTS, *DRAFTS], environment) as running:
        yield running


STOPPED = pytest.param(signal.SIGSTOP, marks=pytest.mark.thorough)  # test_failure.py stops one


@pytest.mark.parametrize("number", [signal.SIGKILL, STOPPED])
def test_a_lost_cache_rank_changes_no_answer(server: Server, number: int) -> None:
    streams = Streams(server)
    state = server.wait_for(60, up=True)

    def disturb() -> None:
        server.signal_cache_rank(number)
        wait_until(lambda: not server.metrics()["sglang_cache_rank_up"], 60)

    responses = streams.run(disturb)
    assert_exact(streams, responses)
    for name in ("retractions", "stale_steps"):
        assert statistics(responses, name) == 0
    state = server.wait_for(60, up=True, starts=state["starts"] + 1)
    assert state["retractions"] == 0

    after = streams.run()
    assert_exact(streams, after)
    for response in after:
        meta = response["meta_info"]
        assert meta["cache_rank"]["sparse_steps"] > 20
        assert meta["spec_num_correct_drafts"] > meta["spec_verify_ct"]
    state = server.wait_for(10, sequences=0)
    assert state["tokens_held"] == state["tokens_kept"]


def test_requests_are_drafted_for_again_by_the_next_cache_rank(server: Server) -> None:
    streams = Streams(server)
    server.wait_for(60, up=True)
    responses = streams.run(lambda: replace_the_cache_rank(server))
    assert_exact(streams, responses)
    reasons = [response["meta_info"]["cache_rank"]["dense_reason"] for response in responses]
    assert reasons == [None] * len(CHAINS)


def test_stops_and_grammars_of_texts_are_heeded(server: Server) -> None:
    """A walk has one right text, and a token of a grammar depends on all before."""
    server.wait_for(60, up=True)
    words = list(CHAINS[0].answer)
    place = next(n for n in range(60, 88) if words[n] not in " ".join(words[:n]))
    asked: list[dict[str, Any]] = [{}, {"stop": [words[place]]}]
    if compat.HAS_GRAMMARS_ON_CPUS:
        asked.append({"regex": "s1( s1)*"})
    answers = []
    for each in asked:  # one by one: beside a grammar, nobody has drafts
        sampling = {"temperature": 0, "max_new_tokens": 90, **each}
        body = {"text": CHAINS[0].prompt, "sampling_params": sampling}
        answers.append(server.post("/generate", body).json())
    free, stopped, *constrained = answers
    assert free["text"].split() == words[:90]
    assert stopped["text"].split() == words[:place]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": words[place]}
    for answer in (free, stopped):
        assert answer["meta_info"]["spec_num_correct_drafts"] > 0
    for answer in constrained:
        assert {*answer["text"].split()} == {"s1"}
        assert answer["meta_info"]["spec_num_correct_drafts"] == 0
