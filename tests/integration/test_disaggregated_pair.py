"""A pair of ranks decodes what another server has prefilled, and loses its cache rank."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from disaggregated import Half, ask_both
from waiting import wait_until
from workload import DENSE, assert_same_answers, random_prompts, sparse_steps, log_probabilities

from scripts.shared.serving import PLAIN, Server, ServerError
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

pytestmark = [pytest.mark.xdist_group("plain server"), pytest.mark.releases]

PROMPTS = random_prompts([700, 30, 512, 257, 110])

PAIR = (
    "--cache-rank-gpus 1 --kv-residency bf16 --dtype float32 --sink-tokens 4 --recent-tokens 8 "
    "--sparse-threshold 100 --max-sparse-requests 8 --max-total-tokens 2500 "
    "--cache-rank-timeout 8 --num-reserved-decode-tokens 8 "
    '--cache-rank-config {"layers_per_group":2,"query_window":4}'
).split()

EVERYTHING = ["--sparse-budget", "1024"]
"""Sparse steps attend to what dense ones do, so that plain SGLang checks them."""

FEW = "--inference-kv working-set --sparse-budget 40 --max-swap-tokens 40".split()

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "2"}


class Servers(NamedTuple):
    """One server prefills, two pairs decode, and one pair does both."""

    prefill: Half
    full: Half
    working_set: Half
    whole: Server


@pytest.fixture(scope="module")
def servers(random_model: Callable[..., Path]) -> Iterator[Servers]:
    of_model = ["--model-path", str(random_model()), "--skip-tokenizer-init"]
    pair = [*PAIR, *of_model]
    large = {ALLOW_LARGE_BUDGET_VARIABLE: "1"}
    with contextlib.ExitStack() as stack:
        started = Servers(
            Half("prefill", [*PLAIN, *of_model, "--chunked-prefill-size", "128"]),
            Half("decode", [*pair, *EVERYTHING], large),
            Half("decode", [*pair, *FEW]),
            Server([*pair, *FEW]),
        )
        for server in started:
            stack.callback(server.stop)
        for server in started:
            server.wait_ready()
        yield started


def test_answers_equal_those_of_one_server(servers: Servers, plain_server: Server) -> None:
    prefill, full, working_set, whole = servers
    wanted = {"return_logprob": True}
    dense = plain_server.generate_all(PROMPTS, 60, **wanted)
    answers = ask_both(prefill, full, PROMPTS, 60, **wanted)
    assert_same_answers(answers, dense, 1e-4)
    print([sparse_steps(a) for a in answers])
    few = ask_both(prefill, working_set, PROMPTS, 60, **wanted)
    print([sparse_steps(a) for a in few])
    theirs = whole.generate_all(PROMPTS, 60, **wanted)
    for x, y in zip(few, theirs):
        l = [abs(p - q) for p, q in zip(log_probabilities(x), log_probabilities(y))]
        print(max(l), next((k for k, v in enumerate(l) if v > 1e-4), None), x["meta_info"]["cache_rank"], y["meta_info"]["cache_rank"])
    assert_same_answers(few, theirs, 1e-4)
