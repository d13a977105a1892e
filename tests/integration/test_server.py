"""A user asks the server over the OpenAI API and reads its metrics."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from scripts.accuracy.pointer_chase import make_chain
from scripts.shared.serving import Server
from sglang_ext import compat

pytestmark = pytest.mark.xdist_group("bundled server")

CHAIN = make_chain(seed=7, facts=128, hops=80)


@pytest.fixture(scope="module", params=["bundled_server", "bundled_inline_server"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none")


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": CHAIN.prompt}],
        max_tokens=CHAIN.max_tokens,
        temperature=0,
        **options,
    )


@pytest.mark.parametrize("server", ["bundled_server"], indirect=True)
def test_a_streamed_answer_walks_the_chain(server: Server, client: OpenAI) -> None:
    text = "".join(
        chunk.choices[0].delta.content or "" for chunk in chat(client, stream=True) if chunk.choices
    )
    assert CHAIN.grade(text).exact
    assert server.cache_rank()["down_bytes"] > 0


def test_the_response_reports_its_sparse_steps(server: Server, client: OpenAI) -> None:
    is_inline = server.cache_rank().get("placement") == "inline"  # then nothing is shipped
    completion = chat(client, extra_body={"return_meta_info": True})
    assert CHAIN.grade(completion.choices[0].message.content).exact
    statistics = completion.choices[0].meta_info["cache_rank"]
    assert CHAIN.max_tokens - 40 < statistics["sparse_steps"] < CHAIN.max_tokens
    assert statistics["dense_reason"] is None
    assert (statistics["tokens_shipped"] > 0) != is_inline
    assert statistics["stale_steps"] == 0


def test_an_answer_does_not_depend_on_batch_mates(server: Server) -> None:
    def ask(seed: int) -> Any:
        chain = make_chain(seed=seed, facts=128, hops=30)
        parameters = {"max_new_tokens": chain.max_tokens, "temperature": 0}
        body = {"text": chain.prompt, "sampling_params": parameters, "return_logprob": True}
        return server.post("/generate", body).json()

    alone = ask(0)
    with ThreadPoolExecutor(6) as pool:
        together, *_ = pool.map(ask, range(6))
    assert together["output_ids"] == alone["output_ids"]
    ours, mates = alone["meta_info"], together["meta_info"]
    # Matrix products round differently in a batch, so that near ties may fall the other way.
    shipped = ours["cache_rank"]["tokens_shipped"]
    assert mates["cache_rank"]["tokens_shipped"] == pytest.approx(shipped, rel=0.01)
    assert mates["cache_rank"]["sparse_steps"] == ours["cache_rank"]["sparse_steps"]
    for one, other in zip(
        ours["output_token_logprobs"], mates["output_token_logprobs"], strict=True
    ):
        assert one[0] == pytest.approx(other[0], abs=1e-4)


@pytest.mark.parametrize("server", ["bundled_server"], indirect=True)
def test_metrics_are_exported_under_their_names(server: Server, client: OpenAI) -> None:
    chat(client)
    server.wait_for(10, tokens_held=0)
    samples = server.metrics()
    expected = {
        "up": 1,
        "tokens_held": 0,
        "bytes_held": 0,
        "sparse_requests": 0,
        "retractions_total": 0,
        "stale_steps_total": 0,
    }
    for name, value in expected.items():
        assert samples[f"sglang_cache_rank_{name}"] == value
    for name in ("tokens_shipped_total", "step_wait_seconds_count"):
        assert samples[f"sglang_cache_rank_{name}"] > 0
    for name in ("delta_overflow_total", "step_wait_seconds_sum"):
        assert samples[f"sglang_cache_rank_{name}"] >= 0


@pytest.mark.skipif(not compat.HAS_GRAMMARS_ON_CPUS, reason="their masks need a GPU")
def test_an_answer_keeps_to_its_grammar(bundled_server: Server) -> None:
    sampling = {"max_new_tokens": 12, "temperature": 1, "regex": "s1( s1)*"}
    body = {"text": "go s1", "sampling_params": sampling}
    answer = bundled_server.post("/generate", body).json()
    assert {*answer["text"].split()} == {"s1"}
