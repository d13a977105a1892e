"""Whatever a request says, the server answers in a sentence, and goes on serving."""

from __future__ import annotations

import re
from typing import Any

import pytest
from workload import streamed

from scripts.shared.serving import Server

pytestmark = pytest.mark.xdist_group("bundled server")

SAMPLED = {"max_new_tokens": 8, "min_new_tokens": 2}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "s1"}],
    "max_tokens": 4,
    "min_tokens": 2,
}


def sampled(**params: Any) -> dict[str, Any]:
    return {"text": "s1", "sampling_params": {**SAMPLED, **params}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"input_ids": [5, 10**6]}, "is not a token"),
    ("/generate", {"input_ids": [10**6], "stream": True}, "is not a token"),
    ("/v1/completions", {"prompt": [5, 10**6]}, "is not a token"),
    ("/generate", {"input_embeds": [[0.5] * 64]}, "send input_ids"),
    ("/generate", sampled(max_new_tokens="8"), "an integer|expected i64"),
    ("/generate", sampled(stop_token_ids=[10**6]), "stop_token_ids"),
    ("/generate", sampled(stop_token_ids=[-1]), "stop_token_ids"),
    ("/v1/chat/completions", {**CHAT, "stop_token_ids": [10**6]}, "stop_token_ids"),
    ("/generate", sampled(n=200_000), "n must be"),
    ("/generate", sampled(n=4000) | {"text": ["s1", "s1"]}, "4096 samples in all"),
    ("/generate", sampled(n=None), "n must be"),
    ("/v1/chat/completions", {**CHAT, "n": 0}, "n must be"),
    ("/generate", sampled(stop_regex="(.+)+\0"), "stop_regex .* a repeat needs an end"),
    ("/generate", sampled(logit_bias={"1000000": 1}), "logit_bias"),
    ("/generate", sampled(is_normalized=True), "is_normalized"),
    ("/generate", sampled(stream_interval=0), "stream_interval"),
    (
        "/generate",
        {"text": ["s1", "s2"], "sampling_params": [SAMPLED]},
        "sampling_params: 1 values for 2 prompts",
    ),
    ("/generate", {**sampled(), "rid": ["a"]}, "rid: a request of one prompt"),
    (
        "/generate",
        {**sampled(), "return_logprob": True, "top_logprobs_num": 10**6},
        "top_logprobs_num",
    ),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
    ("/v1/completions", {"prompt": "s1", "logprobs": 10**6}, "top_logprobs"),
    ("/generate", {**sampled(), "return_hidden_states": []}, "return_hidden_states"),
    ("/generate", {**sampled(), "session_params": {"offset": "x"}}, "session_params"),
    ("/generate", {**sampled(), "custom_labels": {"x": "y"}}, "custom_labels"),
    ("/v1/chat/completions", {**CHAT, "response_format": "json"}, "cannot be read"),
    ("/v1/detokenize", {"tokens": [-1]}, "cannot be read"),
]


@pytest.mark.parametrize(("path", "body", "said"), REFUSED, ids=str)
def test_a_request_that_cannot_be_served_is_refused(
    bundled_server: Server, path: str, body: dict[str, Any], said: str
) -> None:
    response = bundled_server.post(path, body, timeout=30)
    assert re.search(said, response.text)  # newer releases refuse some themselves
    if not body.get("stream"):  # a stream has begun when it is refused
        assert response.status_code == 400
    assert len(bundled_server.generate([5, 6, 7], 2)["output_ids"]) == 2


APIS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", sampled()),
    ("/v1/completions", {"prompt": "s1", "max_tokens": 4}),
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", {"input": "s1", "max_output_tokens": 4}),
    ("/v1/messages", {"model": "default", "messages": CHAT["messages"], "max_tokens": 4}),
]


@pytest.mark.parametrize(("path", "body"), APIS, ids=lambda given: str(given)[:30])
def test_every_api_heeds_or_refuses_what_is_said_of_the_cache_rank(
    bundled_server: Server, path: str, body: dict[str, Any]
) -> None:
    for said, place in (
        ({"cache_rank": False}, "cache_rank is not read"),
        ({"custom_params": {"cache-rank": False}}, "custom_params.cache-rank is not read"),
        ({"custom_params": {"CacheRank": False}}, "custom_params.CacheRank is not read"),
        ({"custom_params": {"cache_rank": "false"}}, "must be true or false"),
        ({"extra_body": {"custom_params": {"cacherank": False}}}, "is not read"),
    ):
        response = bundled_server.post(path, {**body, **said}, timeout=30)
        assert (response.status_code, place in response.text) == (400, True), response.text


LONG = "s1 " * 300
"""A prompt beyond the threshold."""

LONG_CHAT = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": LONG, "sampling_params": {"max_new_tokens": 4}}),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": LONG_CHAT, "max_tokens": 4}),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 4}),
        ("/v1/messages", {"messages": LONG_CHAT, "max_tokens": 4}),
    ],
    ids=lambda given: str(given)[:30],
)
def test_every_api_keeps_a_request_dense_that_asks_for_it(
    bundled_server: Server, path: str, body: dict[str, Any]
) -> None:
    def asked() -> float:
        """How many requests have stayed dense because they said so."""
        lines = bundled_server.get("/metrics").text.splitlines()
        series = [line for line in lines if "dense_requests_total{" in line]
        return sum(float(line.split()[-1]) for line in series if 'reason="asked"' in line)

    before, model = asked(), bundled_server.read("/v1/models")["data"][0]["id"]
    dense = {"custom_params": {"cache_rank": False}}
    for wish, more in (
        ({"custom_params": {"cache_rank": True}}, 0),
        (dense, 1),
        ({"extra_body": dense}, 2),  # where clients put it that take it for the body itself
    ):
        said = {"model": model, **body, **wish}
        assert bundled_server.post(path, said, timeout=60).status_code == 200
        assert asked() - before == more


def test_all_samples_of_a_request_are_aborted(bundled_server: Server) -> None:
    sampling = {"max_new_tokens": 1900, "n": 4, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "rid": "sampled"}
    ends = {}
    for said in streamed(bundled_server, body):
        if not ends and said["meta_info"]["completion_tokens"] < 5:
            assert bundled_server.post("/abort_request", {"rid": "sampled"}).ok
        ends[said["index"]] = said["meta_info"]["finish_reason"]
    assert {index: end["type"] for index, end in ends.items()} == dict.fromkeys(range(4), "abort")
