"""Selection in SGLang's own process with the flags that users have: budgets follow lengths."""

from __future__ import annotations

from pathlib import Path

import pytest
from workload import streamed

from cache_rank.budget import DEFAULT_CURVE
from scripts.shared.serving import Server, serve
from sglang_ext.flags import LEAST_SPARSE_TOKENS

pytestmark = pytest.mark.xdist_group("bundled server")

ALWAYS = 4 + 16
"""Sinks and recent tokens."""


def test_a_request_that_grows_gets_growing_budgets(bundled_inline_server: Server) -> None:
    prompt = [5 + number % 200 for number in range(900)]  # the model has 260 tokens
    sampling = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    said = [one["meta_info"]["cache_rank"] for one in streamed(bundled_inline_server, body)]
    attended = [statistics["attended_tokens"] for statistics in said if statistics]
    found = sorted({*attended} - {0})
    assert attended == sorted(attended)
    assert found[0] == ALWAYS + DEFAULT_CURVE.least  # 192 up to a length of 1,024
    assert found[-1] == ALWAYS + DEFAULT_CURVE.at(900 + 399)
    assert len(found) > 10


def test_the_server_says_what_its_budgets_are(bundled_inline_server: Server) -> None:
    assert bundled_inline_server.cache_rank()["sparse_budget"] == str(DEFAULT_CURVE)
    assert f"--sparse-budget {DEFAULT_CURVE}" in bundled_inline_server.log.read_text()


def test_a_server_with_a_cache_rank_does_too(bundled_server: Server) -> None:
    assert bundled_server.cache_rank()["sparse_budget"] == "40"
    assert "--sparse-budget 40, " in bundled_server.log.read_text()


@pytest.mark.parametrize(
    "flags", ["--cache-rank-gpus 1", pytest.param("", marks=pytest.mark.thorough)]
)
def test_a_server_that_is_told_no_threshold_weighs_its_steps(cache_home: Path, flags: str) -> None:
    """What is shorter on a CPU is as it may be; each request says what its steps were."""
    prompt = [5 + number % 200 for number in range(LEAST_SPARSE_TOKENS)]
    with serve(flags.split(), {"XDG_CACHE_HOME": str(cache_home)}) as server:
        shown = server.cache_rank()
        times = shown["seconds_of_steps"]
        assert min(*times["dense"], *times["sparse"]) >= 0
        assert times["token_bytes"] > times["sketch_bytes"] >= 0
        assert shown["sparse_requests"] == 0
        assert "steps select where that is shorter" in server.log.read_text()
        whole = server.generate(prompt, 40)["meta_info"]["cache_rank"]
        assert whole["dense_reason"] == (None if whole["sparse_steps"] else "not_shorter")
        below = server.generate(prompt[:-10], 5)["meta_info"]["cache_rank"]
        assert (below["sparse_steps"], below["dense_reason"]) == (0, "below_threshold")
        free = server.cache_rank()["pool_free_tokens"]
        assert free == server.read("/server_info")["max_total_num_tokens"]
        assert server.cache_rank().get("losses", 0) == 0
