"""Answers with one draft a round equal those without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from workload import DENSE, SMALL_INLINE, STRICT_POOL, random_prompts

from scripts.shared.serving import Server, serve

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.xdist_group("drafts"),
    pytest.mark.timeout(900),
]

NEW_TOKENS = 128
PROMPTS = random_prompts([30 + 17 * number for number in range(0, 40, 4)], seed=21)


@pytest.fixture(scope="module")
def drafting_server(random_model: Callable[..., Path], cache_home: Path) -> Iterator[Server]:
    flags = [*SMALL_INLINE, "--model-path", str(random_model()), "--sparse-budget", "40"]
    flags += ["--speculative-algorithm", "CACHE_RANK", "--sparse-threshold", "64"]
    flags += ["--speculative-num-draft-tokens", "2", "--max-total-tokens", "20000"]
    with serve(flags, {"XDG_CACHE_HOME": str(cache_home), **STRICT_POOL}) as server:
        yield server


def test_greedy_answers_equal_plain_sglang(drafting_server: Server, plain_server: Server) -> None:
    answers = drafting_server.generate_all(PROMPTS, NEW_TOKENS)
    expected = plain_server.generate_all(PROMPTS, NEW_TOKENS)
    for answer, plain in zip(answers, expected, strict=True):
        assert answer["output_ids"] == plain["output_ids"]
        assert answer["meta_info"]["cache_rank"]["sparse_steps"] > 0


def test_sampled_answers_equal_those_of_requests_that_stay_dense(drafting_server: Server) -> None:
    """Noise is the same, and rounding is not: it may turn the draw between two likely tokens."""
    sampling = {"temperature": 1.0, "top_p": 0.95, "sampling_seed": 77}
    drafted, dense = (
        drafting_server.generate_all(PROMPTS, NEW_TOKENS, sampling_params=sampling | options)
        for options in ({}, DENSE["sampling_params"])
    )
    parted = 0
    for answer, plain in zip(drafted, dense, strict=True):
        parted += answer["output_ids"] != plain["output_ids"]
        assert answer["meta_info"]["cache_rank"]["sparse_steps"] > 0
        assert plain["meta_info"]["cache_rank"]["sparse_steps"] == 0
    assert parted <= 1
