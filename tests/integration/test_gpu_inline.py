"""A GPU selects inside captured graphs, and attends to what it would without selection."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from workload import (
    LIKELY_TOKENS,
    assert_sparse_is_dense,
    random_prompts,
    same_but_for_rounding,
)

from scripts.shared.serving import serve
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
        pytest.param(("deep_model", "--attention-backend fa3"), marks=pytest.mark.gpu(1)),
        pytest.param(
            ("deep_model", "--attention-backend triton --kv-cache-dtype fp8_e4m3"),
            marks=pytest.mark.gpu(1),
        ),
        pytest.param(("model_of_experts", "--attention-backend fa3"), marks=pytest.mark.gpu(1)),
        pytest.param(
            ("deep_model", "--attention-backend fa3 --tp-size 2"), marks=pytest.mark.gpu(2)
        ),
        pytest.param(
            ("deep_model", "--attention-backend fa3 --dp-size 2"), marks=pytest.mark.gpu(2)
        ),
    ],
    ids=" ".join,
)
def generous_budget(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server has a budget no less than any length."""
    model, of_case = request.param
    flags = [*FLAGS, "--model-path", str(request.getfixturevalue(model)), "--sparse-budget", "4096"]
    flags += of_case.split()
    with serve(flags, {ALLOW_LARGE_BUDGET_VARIABLE: "1"}) as server:
        yield server


def test_log_probabilities_equal_dense_ones_when_every_token_is_selected(
    generous_budget: Any,
) -> None:
    """Dense requests attend by the same kernel, whose sums are in another order."""
    assert_sparse_is_dense(generous_budget, 190)


@pytest.mark.gpu(1)
def test_the_same_requests_get_the_same_tokens(deep_model: Path) -> None:
    """Alone and in batches, from prefixes of the radix cache, and in captured graphs.

    The rounding of a step depends on how many requests are in its batch.
    """
    flags = [*FLAGS, "--model-path", str(deep_model), "--sparse-budget", "128"]
    prompts = random_prompts(PROMPTS)
    with serve(flags) as server, ThreadPoolExecutor(8) as pool:

        def answer(prompt: list[int]) -> Any:
            return server.generate(prompt, 300, **LIKELY_TOKENS)

        alone = [answer(prompt) for prompt in prompts]
        together = [list(pool.map(answer, prompts)) for _ in range(2)]
    compared = 0
    for answers in together:
        for found, expected in zip(answers, alone, strict=True):
            assert found["meta_info"]["cached_tokens"] > 500
            assert found["meta_info"]["cache_rank"]["sparse_steps"] > 290
            compared += same_but_for_rounding(found, expected)
    assert compared > 1000


@pytest.mark.gpu(1)
def test_the_kv_cache_is_released_with_its_sketches_and_comes_back(deep_model: Path) -> None:
    flags = [*FLAGS, "--model-path", str(deep_model), "--sparse-budget", "128"]
    (prompt,) = random_prompts([1500])
    with serve([*flags, "--enable-memory-saver"]) as server:
        before = server.generate(prompt, 200)
        for _ in range(2):
            for act in ("release", "resume"):
                body = {"tags": ["kv_cache"]}
                server.post(f"/{act}_memory_occupation", body).raise_for_status()
            again = server.generate(prompt, 200)
            assert again["meta_info"]["cached_tokens"] == 0
            assert again["meta_info"]["cache_rank"]["sparse_steps"] == 199
            assert again["output_ids"] == before["output_ids"]
