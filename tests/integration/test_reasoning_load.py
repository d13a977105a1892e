"""A reasoning load is sent to real servers, and what they report is noted."""

from __future__ import annotations

import asyncio
import re

import pytest

from scripts.shared.models import BUNDLED, BUNDLED_FOLDER, model_config
from scripts.shared.serving import Server, ServerError
from scripts.shared.streaming import Request, send
from scripts.speed.loads import Load, measure
from scripts.speed.serving import spread_logits

pytestmark = pytest.mark.xdist_group("bundled server")

LOAD = Load.parse("4x100-200+120")  # of which the longest turn sparse at 264 tokens
REQUESTS = LOAD.draw(2, model_config(BUNDLED)["vocab_size"], seed=1)


def served(server: Server) -> float:
    """Requests that a server has been sent."""
    samples = re.findall(r"^sglang:num_requests_total\S* (\S+)", server.get("/metrics").text, re.M)
    return sum(map(float, samples))


def test_every_token_of_every_stream_is_noted(bundled_inline_server: Server) -> None:
    noted: list[int] = []
    answers = asyncio.run(send([bundled_inline_server.url], REQUESTS, LOAD.streams, noted.append))
    assert sorted(answer.prompt for answer in answers) == sorted(len(r.prompt) for r in REQUESTS)
    assert sum(noted) == 8 * 120
    for answer in answers:
        assert answer.tokens[-1] == 120
        assert list(answer.tokens) == sorted(set(answer.tokens))
        assert answer.sent < answer.times[0]
        assert list(answer.times) == sorted(answer.times)
        # Its first token is of the prefill; of the others, those count that were read beyond 264.
        assert answer.sparse_steps == max(0, answer.prompt + 120 - 264)
    run = measure(LOAD, answers, client_seconds=0.1)
    assert run.tokens == 8 * 120
    assert 0 < run.sparse_requests < 8
    assert run.tpot_p50 <= run.tpot_p99
    assert run.curve


def test_servers_get_as_many_requests_as_the_other(
    bundled_inline_server: Server, bundled_server: Server
) -> None:
    servers = [bundled_inline_server, bundled_server]
    before = [served(server) for server in servers]
    alike = [Request(request.prompt, 8) for request in REQUESTS[:4]]
    asyncio.run(send([server.url for server in servers], alike, 4, lambda tokens: None))
    assert [served(server) - then for server, then in zip(servers, before, strict=True)] == [2, 2]


@pytest.mark.parametrize("prompt", [[5] * 3000, [5000]])
def test_a_refused_request_ends_a_load(bundled_inline_server: Server, prompt: list[int]) -> None:
    with pytest.raises(ServerError):
        asyncio.run(send([bundled_inline_server.url], [Request(prompt, 5)], 1, int))


def test_dummy_weights_get_norms_of_their_own(bundled_inline_server: Server) -> None:
    def answer() -> list[int]:
        return list(bundled_inline_server.generate(REQUESTS[0].prompt, 20)["output_ids"])

    trained = answer()
    try:
        spread_logits(bundled_inline_server, model_config(BUNDLED))
        assert answer() != trained
    finally:
        body = {"model_path": str(BUNDLED_FOLDER)}
        bundled_inline_server.post("/update_weights_from_disk", body).raise_for_status()
    assert answer() == trained
