"""Whatever a request says, the server answers in a sentence, and goes on serving."""

from __future__ import annotations

import re
from typing import Any

import pytest

from scripts.shared.serving import Server

pytestmark = pytest.mark.xdist_group("bundled server")

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/generate", {"input_ids": [5, 10**6]}, "is not a token"),
    ("/generate", {"input_ids": [5, -3]}, "is not a token"),
    ("/generate", {"input_ids": [[5], [10**6]]}, "is not a token"),
    ("/generate", {"input_ids": [10**6], "stream": True}, "is not a token"),
    ("/v1/completions", {"model": "default", "prompt": [5, 10**6]}, "is not a token"),
    ("/generate", {"input_embeds": [[0.5] * 64]}, "send input_ids"),
    (
        "/generate",
        {"text": "s1", "sampling_params": {"max_new_tokens": "8"}},
        "an integer|expected i64",
    ),
    ("/generate", {"text": "s1", "sampling_params": {"max_new_tokens": -1}}, "an integer"),
    ("/generate", {"text": "s1", "sampling_params": {"custom_params": 3}}, "an object"),
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
