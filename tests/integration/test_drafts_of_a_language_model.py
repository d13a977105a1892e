"""Grammars and stops of texts with drafts, by a real language model: SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.shared.serving import PLAIN, Server, serve
from sglang_ext import compat

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.language_model,
    pytest.mark.xdist_group("language-model"),
    pytest.mark.timeout(900),
]

TEXT = "The quick brown fox counts: one, two, three. " * 14
PLAIN_REQUESTS: list[dict[str, Any]] = [{}, {"stop": ["two"]}, {"min_new_tokens": 20}]
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[0-9]{3}-[a-z]{4}"},
    {
        "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}, '
        '"required": ["a"]}'
    },
]


def answers(server: Server, requests: list[dict[str, Any]]) -> list[Any]:
    """Answers to each request alone, and to all of them at once."""
    sampling = [{"temperature": 0, "max_new_tokens": 24, **each} for each in requests]
    bodies = [{"text": TEXT, "sampling_params": each} for each in sampling]
    alone = [server.post("/generate", body).json() for body in bodies]
    texts = [TEXT] * len(requests)
    return alone + server.post("/generate", {"text": texts, "sampling_params": sampling}).json()


def test_grammars_and_stops_equal_plain_sglang(language_model: Path, tmp_path: Path) -> None:
    requests = PLAIN_REQUESTS + (GRAMMARS if compat.HAS_GRAMMARS_ON_CPUS else [])
    model = ["--model-path", str(language_model)]
    if compat.HAS_GRAMMARS_ON_CPUS:
        model += ["--grammar-backend", "xgrammar"]
    flags = "--speculative-algorithm CACHE_RANK --sparse-threshold 128 --sparse-budget 40".split()
    with serve([*flags, *model], {"XDG_CACHE_HOME": str(tmp_path)}) as server:
        found = answers(server, requests)
    with serve([*PLAIN, *model]) as server:
        expected = answers(server, requests)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["text"] == theirs["text"]
        assert ours["meta_info"]["finish_reason"] == theirs["meta_info"]["finish_reason"]
    free, stopped, *constrained = found[: len(requests)]
    assert free["meta_info"]["spec_num_correct_drafts"] > 10
    assert stopped["meta_info"]["spec_num_correct_drafts"] > 0
    for each in constrained:  # a token of these depends on all before
        assert each["meta_info"]["spec_num_correct_drafts"] == 0
