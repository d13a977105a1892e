"""A GPU drafts and verifies inside captured graphs, and answers as dense decoding does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("--attention-backend fa3", marks=pytest.mark.gpu(1)),
        pytest.param("--attention-backend triton", marks=pytest.mark.gpu(1)),
        pytest.param("--attention-backend fa3 --tp-size 2", marks=pytest.mark.gpu(2)),
        pytest.param("--speculative-draft-weights int4", marks=pytest.mark.gpu(1)),
        *RANKS,
    ],
)
def drafting_server(request: pytest.FixtureRequest, deep_model: Path) -> Iterator[Server]:
    with serve([*FLAGS, "--model-path", str(deep_model), *request.param.split()]) as server:
        yield server


def test_answers_equal_those_without_drafts_but_for_rounding(drafting_server: Server) -> None:
    """One at a time: a request that asks to stay dense is then decoded without drafts."""
    compared = confirmed = rounds = 0
    for prompt in random_prompts([650, 900, 1300, 700]):
        found = drafting_server.generate(prompt, 200, **LIKELY_TOKENS)
        expected = drafting_server.generate(prompt, 200, **LIKELY_TOKENS, **DENSE)
        assert found["meta_info"]["cache_rank"]["sparse_steps"] > 30
        assert expected["meta_info"]["cache_rank"]["sparse_steps"] == 0
        compared += same_but_for_rounding(found, expected)
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
