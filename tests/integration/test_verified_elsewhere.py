"""The cache rank verifies drafts of requests whose tokens have left SGLang's pool."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from workload import (
    DENSE,
    REUSE,
    SMALL_CACHE_RANK,
    STRICT_POOL,
    assert_same_answers,
    difference,
    log_probabilities,
    random_prompts,
)

from scripts.shared.serving import Server, serve

pytestmark = [pytest.mark.xdist_group("verified elsewhere"), pytest.mark.releases]

NEW_TOKENS = 80
PROMPTS = random_prompts([30, 60, 101, 150, 300, 700])
FLAGS = [
    *(*SMALL_CACHE_RANK, *REUSE),
    *"--inference-kv working-set --sparse-budget 40 --cache-rank-timeout 8".split(),
    *"--speculative-algorithm CACHE_RANK".split(),
]


@pytest.fixture(scope="module", params=[0, 1], ids=["no dense layer", "a dense layer"])
def server(request: pytest.FixtureRequest, random_model: Callable[..., Path]) -> Iterator[Server]:
    """Tokens are held as they came. Drafts attend to 52 of them: many drafts are wrong."""
    flags = [*FLAGS, "--dense-layers", str(request.param), "--model-path", str(random_model())]
    with serve(flags, STRICT_POOL) as running:
        yield running


def test_greedy_answers_equal_plain_sglang(server: Server, plain_server: Server) -> None:
    """Short and long ones in one batch."""
    expected = plain_server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    for _ in range(2):
        answers = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
        assert_same_answers(answers, expected, tolerance=1e-4)
    last = answers[-1]["meta_info"]
    assert last["cache_rank"]["dense_reason"] is None
    assert 0 < last["spec_num_correct_drafts"] < 7 * last["spec_verify_ct"]
