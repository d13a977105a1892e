"""Drafts with weights of 4 bits: other drafts, and the same answers.

All tokens are selected, so that drafts are wrong only where their weights make them so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor
from workload import (
    DENSE,
    LIKELY_TOKENS,
    STRICT_POOL,
    assert_same_answers,
    copy_model,
    random_prompts,
    same_but_for_rounding,
    select_everything,
    sparse_steps,
)

from scripts.shared.serving import Server, serve
from sglang_ext.four_bits import GROUP, restore, round_groups
from sglang_ext.refusals import ALLOW_LARGE_BUDGET_VARIABLE

pytestmark = pytest.mark.xdist_group("drafts")

NEW_TOKENS, DRAFTS = 80, 8
PROMPTS = random_prompts([120, 150, 300, 700], seed=20)
INT4 = "--speculative-algorithm CACHE_RANK --speculative-draft-weights int4".split()
ON_GPUS = (
    "--skip-tokenizer-init --dtype bfloat16 --sparse-threshold 100 --sparse-budget 4000 "
    "--recent-tokens 32 --context-length 4096 --cuda-graph-bs-decode 1 2 "
    "--max-total-tokens 20000 --grammar-backend none --cuda-graph-backend-prefill disabled"
).split()


@pytest.fixture(scope="module")
def server(random_model: Callable[..., Path], cache_home: Path) -> Iterator[Server]:
    with select_everything(random_model(), cache_home, *INT4, **STRICT_POOL) as running:
        yield running


def right_drafts(answers: list[Any]) -> float:
    """The share of all drafts that were right."""
    found = [answer["meta_info"] for answer in answers]
    rounds = sum(each["spec_verify_ct"] for each in found)
    return sum(each["spec_num_correct_drafts"] for each in found) / (DRAFTS * rounds)


def test_answers_equal_plain_sglang_and_drafts_are_others(
    server: Server, plain_server: Server
) -> None:
    expected = plain_server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    answers = server.generate_all(PROMPTS, NEW_TOKENS, return_logprob=True)
    assert_same_answers(answers, expected, tolerance=1e-4)
    assert min(map(sparse_steps, answers)) > NEW_TOKENS / 2
    assert 0.03 < right_drafts(answers) < 0.5


def other_rounded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Other weights of linear layers, as 4 bits keep them: rounding does not change them again."""
    linear = {name: weight for name, weight in weights.items() if "_proj.weight" in name}
    return {
        name: restore(*round_groups(weight.flip(0), min(GROUP, weight.shape[1])))
        for name, weight in linear.items()
    }


def load(server: Server, folder: Path) -> None:
    """Have a server load other weights."""
    server.wait_for(10, sparse_requests=0)
    server.flush_cache()  # SGLang loads none while a step is under way
    answer = server.post("/update_weights_from_disk", {"model_path": str(folder)}).json()
    assert answer["success"], answer


def test_other_weights_are_rounded_too(
    server: Server, random_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Of weights that have 4 bits, drafts have the same: all are right."""
    model = random_model()
    other = copy_model(model, tmp_path, other_rounded(load_file(model / "model.safetensors")))
    for folder, is_rounded in ((other, True), (model, False)):
        load(server, folder)
        answers = [server.generate(prompt, NEW_TOKENS) for prompt in PROMPTS[::2]]
        expected = [server.generate(prompt, NEW_TOKENS, **DENSE) for prompt in PROMPTS[::2]]
        assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in expected]
        if is_rounded:  # the last of nine rounds needs no more than seven drafts
            assert right_drafts(answers) > 0.95
        else:
            assert right_drafts(answers) < 0.5


def test_the_server_says_what_memory_they_take(
    server: Server, random_model: Callable[..., Path]
) -> None:
    weights = load_file(random_model() / "model.safetensors")
    linear = sum(weight.nbytes for name, weight in weights.items() if "_proj.weight" in name)
    assert server.cache_rank()["draft_weight_bytes"] == linear  # on a CPU as wide as the model's


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "tp_size",
    [pytest.param(1, marks=pytest.mark.gpu(1)), pytest.param(2, marks=pytest.mark.gpu(2))],
)
def test_captured_drafts_have_weights_of_4_bits_that_follow_the_models(
    tp_size: int, deep_model: Path, tmp_path: Path
) -> None:
    weights = load_file(deep_model / "model.safetensors")
    other = copy_model(deep_model, tmp_path, other_rounded(weights))
    linear = sum(weight.nbytes for name, weight in weights.items() if "_proj.weight" in name)
    flags = [*ON_GPUS, *INT4, "--model-path", str(deep_model), "--tp-size", str(tp_size)]
    with serve(flags, {ALLOW_LARGE_BUDGET_VARIABLE: "1"}) as server:
        assert 0.25 < server.cache_rank()["draft_weight_bytes"] / (linear / tp_size) < 0.3
        shares = []
        for folder in (deep_model, other, deep_model):
            load(server, folder)
            answers = [server.generate(prompt, 200, **LIKELY_TOKENS) for prompt in PROMPTS]
            expected = [
                server.generate(prompt, 200, **LIKELY_TOKENS, **DENSE) for prompt in PROMPTS
            ]
            pairs = zip(answers, expected, strict=True)
            assert sum(same_but_for_rounding(*pair) for pair in pairs) > 60
            shares.append(right_drafts(answers))
    assert min(shares[0], shares[2]) > 0.05
    assert shares[1] > max(0.8, shares[0] + 0.1, shares[2] + 0.1), shares
