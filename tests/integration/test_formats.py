"""On the real engine, a residency format that shares no pages changes decode by its error."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
from workload import DENSE, SMALL_CACHE_RANK, log_probabilities, random_prompts

from scripts.shared.serving import serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

NEW_TOKENS = 120
PROMPTS = random_prompts([900, 700])


@pytest.mark.thorough
def test_log_probabilities_differ_by_the_error_of_mosaickv(
    random_model: Callable[..., Path],
) -> None:
    """Every token is selected, so nothing but how it is held sets sparse decode apart.

    Tests of the bundled model hold the default format, and test_dense_equivalence.py holds bf16.
    """
    flags = [
        *SMALL_CACHE_RANK,
        *("--model-path", str(random_model()), "--skip-tokenizer-init"),
        *("--sparse-threshold", "500", "--sparse-budget", "1400", "--max-swap-tokens", "128"),
        *("--kv-residency", "mosaickv"),
    ]
    with serve(flags, {ALLOW_LARGE_BUDGET_VARIABLE: "1"}) as server:
        dense = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True, **DENSE)
        found = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
        state = server.cache_rank()
    assert (state["starts"], state["refused_messages"], state["tokens_adopted"]) == (1, 0, 0)
    differences = []
    for ours, theirs in zip(found, dense, strict=True):
        assert ours["meta_info"]["cache_rank"]["sparse_steps"] > 80
        # The texts part where the two best tokens are closer than the error.
        pairs = zip(ours["output_ids"], theirs["output_ids"], strict=True)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        sides = log_probabilities(ours)[:same], log_probabilities(theirs)[:same]
        differences += [abs(one - other) for one, other in zip(*sides, strict=True)]
    assert len(differences) > 50
    assert statistics.mean(differences) <= 3e-2
