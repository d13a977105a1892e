"""Selection in SGLang's own process with the flags that users have: budgets follow lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from scripts.shared.serving import Server
from sglang_ext.budget import INLINE_CURVE

pytestmark = pytest.mark.xdist_group("bundled server")

ALWAYS = 4 + 16
"""Sinks and recent tokens."""


def stream(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a response says of its request, token by token."""
    url = f"{server.url}/generate"
    with requests.post(url, json={**body, "stream": True}, stream=True, timeout=300) as response:
        for line in response.iter_lines():
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))["meta_info"]


def test_a_request_that_grows_gets_growing_budgets(bundled_inline_server: Server) -> None:
    prompt = [5 + number % 200 for number in range(900)]  # the model has 260 tokens
    sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    said = list(stream(bundled_inline_server, {"input_ids": prompt, "sampling_params": sampling}))
    attended = [one["cache_rank"]["attended_tokens"] for one in said if one["cache_rank"]]
    found = sorted({*attended} - {0})
    assert attended == sorted(attended)
    assert found[0] == ALWAYS + INLINE_CURVE.least  # 192 up to a length of 1,024
    assert found[-1] == ALWAYS + INLINE_CURVE.at(900 + 399)
    assert len(found) > 10


def test_the_server_says_what_its_budgets_are(bundled_inline_server: Server) -> None:
    assert bundled_inline_server.cache_rank()["sparse_budget"] == str(INLINE_CURVE)
    assert f"--sparse-budget {INLINE_CURVE}" in bundled_inline_server.log.read_text()
