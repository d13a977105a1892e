"""A server answers whatever its schemas let requests say, without a 5xx, and goes on serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from scripts.shared.serving import Server

pytestmark = [pytest.mark.xdist_group("bundled server"), pytest.mark.thorough]

SAMPLING = {"max_new_tokens": 2, "min_new_tokens": 1}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

SERVED: dict[str, dict[str, Any]] = {
    "/generate": {"text": "s1", "sampling_params": SAMPLING, "return_logprob": True},
    "/encode": {"text": "s1"},
    "/classify": {"text": "s1"},
    "/v1/completions": {"prompt": "s1", "max_tokens": 2},
    "/v1/chat/completions": {**MESSAGES, "logprobs": True},
    "/v1/responses": {"input": "s1", "max_output_tokens": 2},
    "/v1/messages": {"model": "default", **MESSAGES},
    "/v1/messages/count_tokens": {"model": "default", "messages": MESSAGES["messages"]},
    "/v1/embeddings": {"input": "s1"},
    "/v1/classify": {"input": "s1"},
    "/v1/score": {"query": "s1", "items": ["a", "b"], "label_token_ids": [1, 2]},
    "/v1/rerank": {"query": "s1", "documents": ["a", "b"]},
    "/v1/tokenize": {"prompt": "s1"},
    "/v1/detokenize": {"tokens": [1, 2]},
    "/api/chat": {"model": "m", "stream": False, **MESSAGES, "options": {"num_predict": 2}},
    "/api/generate": {
        "model": "m",
        "prompt": "s1",
        "stream": False,
        "options": {"num_predict": 2},
    },
}
"""A request of each API, whose fields are replaced one by one."""

LISTS: list[Any] = [[], [[]], [None], [10**6], [-1], [1.5], ["a"], [{}], [2**63], ["a"] * 3]

EXTREMES: dict[str, list[Any]] = {
    "integer": [-1, 0, 2**31, 2**63, 10**30, "8", 1.5],
    "number": [float("nan"), float("inf"), 1e308, -1e308, "x"],
    "string": ["", "\0", "\ud800", "a" * 5000, 5],
    "array": LISTS,
    "object": [{}, {"a": {}}, {"1000000": 1}, {"-1": 1}, {"5": 1e308}, {"x": "y"}, [{}]],
    "boolean": ["x", 7],
}
"""Values that code may not expect where a schema has a type."""

SAMPLING_FIELDS = {
    "integer": "max_new_tokens min_new_tokens n top_k beam_width stream_interval sampling_seed",
    "number": "temperature top_p min_p frequency_penalty presence_penalty repetition_penalty",
    "string": "stop stop_regex json_schema regex ebnf structural_tag",
    "array": "stop stop_regex stop_token_ids",
    "object": "logit_bias custom_params",
    "boolean": "ignore_eos no_stop_trim skip_special_tokens is_normalized",
}
"""The fields of SamplingParams, of which the schema of /generate says nothing."""


def bodies(schema: dict[str, Any], base: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """For each field, requests with the extremes of all types that its schema names."""
    for name, described in schema["properties"].items():
        types = json.dumps(described)
        named = [kind for kind in EXTREMES if f'"{kind}"' in types] or list(EXTREMES)
        values = (None, *(value for kind in named for value in EXTREMES[kind]))
        rest = {**base}
        if name in ("input_ids", "input_embeds"):  # one of them and the text are too many
            rest.pop("text", None)
        yield [{**rest, name: value} for value in values]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", SERVED)
def test_the_extremes_of_every_field_are_answered(bundled_server: Server, path: str) -> None:
    described = bundled_server.read("/openapi.json")
    if path not in described["paths"]:
        pytest.skip("this release does not serve it")
    content = described["paths"][path]["post"]["requestBody"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    base = {**SERVED[path]}
    if path == "/v1/responses":  # which takes no other name of a model, and not none
        base["model"] = bundled_server.read("/v1/models")["data"][0]["id"]
    _answers(bundled_server, path, bodies(described["components"]["schemas"][name], base))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SAMPLING_FIELDS)
def test_the_extremes_of_every_sampling_parameter_are_answered(
    bundled_server: Server, kind: str
) -> None:
    _answers(
        bundled_server,
        "/generate",
        (
            [
                {"text": "s1", "sampling_params": {**SAMPLING, name: value}}
                for value in (None, *EXTREMES[kind])
            ]
            for name in SAMPLING_FIELDS[kind].split()
        ),
    )


def _answers(server: Server, path: str, asked: Iterator[list[dict[str, Any]]]) -> None:
    """Requests are answered, and those of each field leave a server that answers others."""
    expected = server.generate([5, 6, 7], 2)["output_ids"]
    for bodies_of_field in asked:
        for body in bodies_of_field:
            text = json.dumps(body)  # with what JSON has no words for
            response = requests.post(
                f"{server.url}{path}",
                data=text,
                headers={"Content-Type": "application/json"},
                timeout=120,
            )
            assert response.status_code < 500, f"{text[:300]}: {response.text[:300]}"
        assert server.generate([5, 6, 7], 2)["output_ids"] == expected, text[:300]
