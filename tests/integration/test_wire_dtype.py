"""On the real engine, tokens that travel in 8 bits answer as well."""

from __future__ import annotations

import pytest

from scripts.accuracy.pointer_chase import make_chain
from scripts.shared.serving import serve

CHAIN = make_chain(seed=7, facts=128, hops=80)
# A working set of 60 tokens, so that most of what attention reads has travelled.
FLAGS = (
    "--sparse-threshold 264 --sparse-budget 40 --recent-tokens 16 --hysteresis 8 "
    "--max-swap-tokens 40"
).split()


@pytest.mark.thorough
def test_rounded_tokens_walk_the_chain() -> None:
    sampling = {"temperature": 0, "max_new_tokens": CHAIN.max_tokens}
    body = {"text": CHAIN.prompt, "sampling_params": sampling}
    rounded = ["--cache-rank-config", '{"wire_dtype": "int8"}']
    with serve(["--cache-rank-gpus", "1", *FLAGS, *rounded]) as server:
        response = server.post("/generate", body).json()
    assert CHAIN.grade(response["text"]).correct_hops == 80
    assert response["meta_info"]["cache_rank"]["tokens_shipped"] > 0
