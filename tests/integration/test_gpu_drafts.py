"""A GPU drafts and verifies inside captured graphs, and answers as dense decoding does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from workload import DENSE, LIKELY_TOKENS, random_prompts, same_but_for_rounding

from scripts.shared.serving import Server, serve

pytestmark = pytest.mark.timeout(600)

FLAGS = (
    "--skip-tokenizer-init --dtype bfloat16 --sparse-threshold 600 --sparse-budget 512 "
    "--recent-tokens 32 --cuda-graph-bs-decode 1 2 4 8 --max-running-requests 16 "
    "--max-total-tokens 100000 --grammar-backend none --chunked-prefill-size 512 "
    "--speculative-algorithm CACHE_RANK --cuda-graph-backend-prefill disabled"
).split()


RANK = "--cache-rank-gpus 1 --kv-residency bf16 --cache-rank-mem-fraction 0.2"
RANKS = [
    pytest.param(f"{RANK} {flags}", marks=pytest.mark.gpu(2, ranks=True))
    for flags in (
        "--attention-backend fa3",
        '--attention-backend triton --cache-rank-config {"cache_rank_transfer_backend":"nccl"}',
    )
]


VERIFIED_ELSEWHERE = [
    pytest.param(f"{RANK} --inference-kv working-set {flags}", marks=pytest.mark.gpu(2, ranks=True))
    for flags in (
        "--attention-backend fa3 --kv-residency quantspec",
        '--attention-backend triton --cache-rank-config {"cache_rank_transfer_backend":"nccl"}',
    )
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("--attention-backend fa3", marks=pytest.mark.gpu(1)),
        pytest.param("--attention-backend triton", marks=pytest.mark.gpu(1)),
        pytest.param("--attention-backend fa3 --tp-size 2", marks=pytest.mark.gpu(2)),
        pytest.param("--speculative-draft-weights int4", marks=pytest.mark.gpu(1)),
        *RANKS,
        *VERIFIED_ELSEWHERE,
    ],
)
def drafting_server(request: pytest.FixtureRequest, deep_model: Path) -> Iterator[Server]:
    with serve([*FLAGS, "--model-path", str(deep_model), *request.param.split()]) as server:
        is_coded = "quantspec" in request.param
        server.tolerance = 0.3 if is_coded else 0.1  # type: ignore[attr-defined]
        yield server


def same(server: Server, found: Any, expected: Any) -> int:
    """How many tokens are the same, but for what rounds on this server."""
    return same_but_for_rounding(found, expected, server.tolerance)  # type: ignore[attr-defined]


def test_answers_equal_those_without_drafts_but_for_rounding(drafting_server: Server) -> None:
    """One at a time: a request that asks to stay dense is then decoded without drafts."""
    compared = confirmed = rounds = 0
    for prompt in random_prompts([650, 900, 1300, 700]):
        found = drafting_server.generate(prompt, 200, **LIKELY_TOKENS)
        expected = drafting_server.generate(prompt, 200, **LIKELY_TOKENS, **DENSE)
        assert found["meta_info"]["cache_rank"]["sparse_steps"] > 30
        assert expected["meta_info"]["cache_rank"]["sparse_steps"] == 0
        compared += same(drafting_server, found, expected)
        confirmed += found["meta_info"]["spec_num_correct_drafts"]
        rounds += found["meta_info"]["spec_verify_ct"]
    assert compared > 60  # texts of random weights come to near ties, and then part
    state = drafting_server.cache_rank()
    is_rounded, predicts = state.get("draft_weight_bytes") is not None, "up" in state
    assert confirmed > rounds * (0.2 if is_rounded or predicts else 1)  # of eight in a round


def test_a_batch_of_many_lengths_gets_all_its_tokens(drafting_server: Server) -> None:
    prompts = random_prompts([700, 30, 2500, 650, 100, 800])
    for _ in range(2):
        answers = drafting_server.generate_all(prompts, 150)
        assert [len(answer["output_ids"]) for answer in answers] == [150] * 6
    assert drafting_server.wait_for(10, sparse_requests=0)["drafts"]["rounds"] > 10


@pytest.mark.parametrize("drafting_server", RANKS, indirect=True)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_cache_rank_makes_poor_drafts(drafting_server: Server, sent: int) -> None:
    """Rounds that are under way go on, nothing is recomputed, and the next rank selects again."""
    prompts, starts = random_prompts([700, 900, 1300, 650]), drafting_server.cache_rank()["starts"]
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(drafting_server.generate_all, prompts, 1500)
        drafting_server.wait_for(60, sparse_requests=4)
        drafting_server.signal_cache_rank(sent)
        for answer in answers.result():
            assert len(answer["output_ids"]) == 1500
            statistics = answer["meta_info"]["cache_rank"]
            assert (statistics["retractions"], statistics["stale_steps"]) == (0, 0)
    drafting_server.wait_for(60, up=True, starts=starts + 1)
    test_answers_equal_those_without_drafts_but_for_rounding(drafting_server)


@pytest.mark.parametrize("drafting_server", VERIFIED_ELSEWHERE, indirect=True)
def test_sparse_requests_are_verified_where_a_batch_has_no_drafts(drafting_server: Server) -> None:
    """A request with a penalty decodes beside, for which each decodes one token at a time."""
    (prompt, beside), compared = random_prompts([900, 700], seed=3), 0
    expected = drafting_server.generate(prompt, 200, **LIKELY_TOKENS, **DENSE)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(drafting_server.generate, prompt, 200, **LIKELY_TOKENS)
        drafting_server.wait_for(60, sparse_requests=1)
        drafting_server.generate(beside, 40, sampling_params={"frequency_penalty": 0.5})
        found = answer.result()
    compared += same(drafting_server, found, expected)
    assert compared > 10
    assert found["meta_info"]["cache_rank"]["dense_reason"] is None


@pytest.mark.parametrize("drafting_server", VERIFIED_ELSEWHERE, indirect=True)
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_cache_rank_verified_is_computed_again(
    drafting_server: Server, sent: int
) -> None:
    """Answers with a loss are those without one, but for rounding."""
    prompts = random_prompts([700, 900, 1300, 650], seed=4)
    before = drafting_server.wait_for(60, up=True)
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(drafting_server.generate_all, prompts, 1200, **LIKELY_TOKENS)
        drafting_server.wait_for(60, sparse_requests=4)
        drafting_server.signal_cache_rank(sent)
        found = answers.result()
    assert sum(each["meta_info"]["cache_rank"]["retractions"] for each in found) >= 4
    for prompt, answer in zip(prompts, found, strict=True):
        expected = drafting_server.generate(prompt, 1200, **LIKELY_TOKENS, **DENSE)
        assert len(answer["output_ids"]) == 1200
        same(drafting_server, answer, expected)
    free, starts = before["pool_free_tokens"], before["starts"] + 1
    drafting_server.wait_for(60, up=True, starts=starts, pool_free_tokens=free)
    test_answers_equal_those_without_drafts_but_for_rounding(drafting_server)
