"""One card prefills in a server and decodes in another, which selects among what has arrived."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from disaggregated import Half, ask_both
from workload import DENSE, LIKELY_TOKENS, random_prompts, same_but_for_rounding, sparse_steps

from cache_rank.channels.rate import LINK_GBPS_VARIABLE
from cache_rank.pages import PAGE_TOKENS
from sglang_ext.flags import MOST_WIRE_DRAFTS
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(600)]

FLAGS = (
    "--skip-tokenizer-init --dtype bfloat16 --cuda-graph-bs-decode 1 2 4 8 "
    "--cuda-graph-backend-prefill disabled --max-running-requests 16 --max-total-tokens 60000 "
    "--sampling-backend pytorch --grammar-backend none --chunked-prefill-size 512 "
    "--mem-fraction-static 0.4"
).split()
SELECT = "--sparse-threshold 600 --sparse-budget 4300 --recent-tokens 32".split()
"""The budget covers everything, so that a sparse step attends to what a dense one does."""

BY_A_CACHE_RANK = (
    "--cache-rank-gpus 1 --inference-kv working-set --query-predictor last "
    "--max-swap-tokens 4300 --max-sparse-requests 8 --cache-rank-mem-fraction 0.2"
).split()
ALLOWED = {ALLOW_LARGE_BUDGET_VARIABLE: "1"}
PROMPTS = random_prompts([4000, 700, 1500, 2500, 650, 1100], seed=31)


@pytest.fixture(scope="module")
def halves(deep_model: Path) -> Iterator[tuple[Half, Half]]:
    of_model = [*FLAGS, "--model-path", str(deep_model)]
    with contextlib.ExitStack() as stack:
        prefill = Half("prefill", of_model)
        stack.callback(prefill.stop)
        prefill.wait_ready()
        decode = Half("decode", [*of_model, *SELECT], ALLOWED)
        stack.callback(decode.stop)
        yield prefill, decode.wait_ready()


@pytest.mark.parametrize("codes", ["bf16", "quantspec", "hack", "lynx"])
def test_sparse_steps_attend_to_what_arrived(halves: tuple[Half, Half], codes: str) -> None:
    """What is decoded of the codes is the same for both requests, and so are the answers."""
    compared = 0
    for prompt in PROMPTS:
        chosen = {"wire_codes": codes}
        sparse = {"sampling_params": {"custom_params": chosen}}
        dense = {"sampling_params": {"custom_params": {**chosen, "cache_rank": False}}}
        (found,) = ask_both(*halves, [prompt], 60, **LIKELY_TOKENS, **sparse)
        (expected,) = ask_both(*halves, [prompt], 60, **LIKELY_TOKENS, **dense)
        assert (sparse_steps(found), sparse_steps(expected)) == (59, 0)
        compared += same_but_for_rounding(found, expected)
    assert compared > 60


def test_prompts_arrive_while_others_decode(halves: tuple[Half, Half]) -> None:
    """All at once, and one by one: the same but for rounding."""
    alone = [ask_both(*halves, [one], 40, **LIKELY_TOKENS, **DENSE)[0] for one in PROMPTS]
    together = ask_both(*halves, PROMPTS, 40, **LIKELY_TOKENS, **DENSE)
    compared = sum(map(same_but_for_rounding, together, alone))
    assert compared > 40
    assert halves[1].cache_rank()["pool_free_tokens"] >= 59_000


def test_drafts_on_anchors_that_stand_are_those_of_whole_prompts(deep_model: Path) -> None:
    """Until a verification rounds otherwise than decode steps; wrong K and V would differ early."""
    of_model = [*FLAGS, "--model-path", str(deep_model)]
    with contextlib.ExitStack() as stack:
        prefill = Half("prefill", of_model, {LINK_GBPS_VARIABLE: "0.5"})
        stack.callback(prefill.stop)
        prefill.wait_ready()
        decode = Half("decode", [*of_model, "--wire-drafts", str(MOST_WIRE_DRAFTS)])
        stack.callback(decode.stop)
        halves, found = (prefill, decode.wait_ready()), {}
        for drafts in (False, True):
            custom = {"wire_codes": "lynx", "wire_drafts": drafts, "cache_rank": False}
            params = {"sampling_params": {"custom_params": custom}}
            ask_both(*halves, PROMPTS[-1:], 80, **params)
            found[drafts] = ask_both(*halves, PROMPTS[:4], 80, **params)
    same = 0
    for answer, wanted in zip(found[True], found[False], strict=True):
        pairs = zip(answer["output_ids"], wanted["output_ids"], strict=True)
        same += len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
    assert same > 24
    ours = [answer["meta_info"]["cache_rank"] for answer in found[True]]
    assert sum(one["wire_drafts"] for one in ours) > 0  # how many, the machine decides
    assert sum(one["wire_drafts_accepted"] for one in ours) > 0


@pytest.mark.gpu(2, ranks=True)
@pytest.mark.parametrize("codes", ["quantspec", "bf16"])
def test_a_cache_rank_has_what_arrived(
    halves: tuple[Half, Half], deep_model: Path, codes: str
) -> None:
    """It holds the codes that came, and what it decodes of them is what the pool has."""
    flags = [*FLAGS, *SELECT, *BY_A_CACHE_RANK, "--kv-residency", codes]
    chosen = {"wire_codes": codes}
    sparse = {"sampling_params": {"custom_params": chosen}}
    dense = {"sampling_params": {"custom_params": {**chosen, "cache_rank": False}}}
    pair = Half("decode", [*flags, "--model-path", str(deep_model)], ALLOWED)
    try:
        both, compared = (halves[0], pair.wait_ready()), 0
        for prompt in PROMPTS:
            (found,) = ask_both(*both, [prompt], 60, **LIKELY_TOKENS, **sparse)
            (expected,) = ask_both(*both, [prompt], 60, **LIKELY_TOKENS, **dense)
            assert sparse_steps(found) > 30
            compared += same_but_for_rounding(found, expected)
        assert compared > 60
        state = pair.wait_for(20, sequences=0)
    finally:
        pair.stop()
    came = sum(len(prompt) // PAGE_TOKENS for prompt in PROMPTS) * PAGE_TOKENS
    assert state["tokens_passed_on"] == (came if codes == "quantspec" else 0)
    assert (state["losses"], state["refused_messages"]) == (0, 0)
