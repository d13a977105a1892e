"""On the real engine, a residency format changes decode by its error."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from workload import DENSE, SMALL_CACHE_RANK, random_prompts

from scripts.shared.serving import log_probabilities, serve
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

NEW_TOKENS = 120
PROMPTS = random_prompts([900, 700])


class Format(NamedTuple):
    """A format changes a log-probability by no more than `most` on average."""

    name: str
    options: str
    most: float

    def __str__(self) -> str:
        return f"{self.name} {self.options}".strip()


FORMATS = [
    Format("quantspec", "", 3e-3),
    Format("lynx", "", 2e-3),
    Format("hack", "", 3e-2),
    Format("mosaickv", "", 3e-2),
]
"""These formats lose something. test_dense_equivalence.py tests the one that does not."""

PARAMETERS = [
    pytest.param(held, id=str(held), marks=[pytest.mark.thorough] if index else [])
    for index, held in enumerate(FORMATS)
]


@pytest.mark.parametrize("held", PARAMETERS)
def test_log_probabilities_differ_by_the_error_of_the_format(
    held: Format, random_model: Callable[..., Path]
) -> None:
    """Every token is selected, so nothing but how it is held sets sparse decode apart."""
    flags = [
        *SMALL_CACHE_RANK,
        *("--model-path", str(random_model()), "--skip-tokenizer-init"),
        *("--sparse-threshold", "500", "--sparse-budget", "1400", "--max-swap-tokens", "128"),
        *("--kv-residency", held.name),
    ]
    if held.options:
        flags += ["--cache-rank-config", json.dumps({"kv_residency_options": held.options})]
    with serve(flags, {ALLOW_LARGE_BUDGET_VARIABLE: "1"}) as server:
        dense = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True, **DENSE)
        found = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
        # Again, from pages that came in chunks of 64 tokens: quantspec keeps 128 beside a page.
        found += server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
        state = server.cache_rank()
    assert (state["starts"], state["refused_messages"]) == (1, 0)
    assert (state["tokens_adopted"] > 0) == (held.name != "mosaickv")
    differences = []
    for ours, theirs in zip(found, 2 * dense, strict=True):
        assert ours["meta_info"]["cache_rank"]["sparse_steps"] > 80
        # The texts part where the two best tokens are closer than the error.
        pairs = zip(ours["output_ids"], theirs["output_ids"], strict=True)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        sides = log_probabilities(ours)[:same], log_probabilities(theirs)[:same]
        differences += [abs(one - other) for one, other in zip(*sides, strict=True)]
    assert len(differences) > 50
    assert statistics.mean(differences) <= held.most
