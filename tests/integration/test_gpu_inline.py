"""A GPU selects inside captured graphs, and attends to what it would without selection."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from workload import DENSE, random_prompts

from scripts.shared.serving import log_probabilities, serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

pytestmark = pytest.mark.timeout(600)

FLAGS = (
    "--skip-tokenizer-init --dtype bfloat16 --sparse-threshold 600 "
    "--recent-tokens 32 --cuda-graph-bs-decode 1 2 4 8 --max-running-requests 16 "
    "--max-total-tokens 100000 --sampling-backend pytorch --grammar-backend none "
    "--chunked-prefill-size 512"
).split()
PROMPTS = [700, 1500, 900, 2500, 650, 1100, 800, 2000]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("--attention-backend fa3", marks=pytest.mark.gpu(1)),
        pytest.param(
            "--attention-backend triton --kv-cache-dtype fp8_e4m3", marks=pytest.mark.gpu(1)
        ),
        pytest.param("--attention-backend fa3 --tp-size 2", marks=pytest.mark.gpu(2)),
    ],
)
def generous_budget(deep_model: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server has a budget no less than any length."""
    flags = [*FLAGS, "--model-path", str(deep_model), "--sparse-budget", "4096"]
    flags += request.param.split()
    with serve(flags, {ALLOW_LARGE_BUDGET_VARIABLE: "1"}) as server:
        yield server


def test_log_probabilities_equal_dense_ones_when_every_token_is_selected(
    generous_budget: Any,
) -> None:
    """Dense requests attend by the same kernel, whose sums are in another order."""
    compared = 0
    for prompt in random_prompts([650, 900, 1300, 700]):
        wish = {"return_logprob": True, "top_logprobs_num": 8}
        found = generous_budget.generate(prompt, 200, **wish)
        expected = generous_budget.generate(prompt, 200, **wish, **DENSE)
        assert found["meta_info"]["cache_rank"]["sparse_steps"] > 190
        assert expected["meta_info"]["cache_rank"]["sparse_steps"] == 0
        # Where tokens are equally likely, rounding decides, and the rest is another text.
        pairs = zip(found["output_ids"], expected["output_ids"], strict=True)
        same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), 200)
        if same < 200:
            top = expected["meta_info"]["output_top_logprobs"][same]
            likely = {token: logprob for logprob, token, *_ in top}
            assert likely[found["output_ids"][same]] > max(likely.values()) - 0.2, (same, top)
        ours, theirs = log_probabilities(found)[:same], log_probabilities(expected)[:same]
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 0.1
        compared += same
    assert compared > 200


@pytest.mark.gpu(1)
def test_the_same_requests_get_the_same_tokens(deep_model: Path) -> None:
    """In batches of other companions, from prefixes of the radix cache, and in captured graphs."""
    flags = [*FLAGS, "--model-path", str(deep_model), "--sparse-budget", "128"]
    prompts = random_prompts(PROMPTS)
    with serve(flags) as server, ThreadPoolExecutor(8) as pool:
        alone = [server.generate(prompt, 1) for prompt in prompts]
        first, second = (
            list(pool.map(server.generate, prompts, [300] * len(prompts))) for _ in range(2)
        )
    assert all(answer["meta_info"]["cached_tokens"] > 500 for answer in second)
    for one, again, prefilled in zip(first, second, alone, strict=True):
        assert one["output_ids"][0] == prefilled["output_ids"][0]
        assert one["meta_info"]["cache_rank"]["sparse_steps"] > 290
        assert again["output_ids"] == one["output_ids"]
