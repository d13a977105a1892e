"""Selection drafts and one dense pass verifies: answers are those of plain SGLang."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from sglang.srt.layers.sampler import (
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from workload import (
    REUSE,
    SMALL_CACHE_RANK,
    SMALL_INLINE,
    STRICT,
    STRICT_POOL,
    VOCABULARY,
    assert_same_answers,
    difference,
    random_prompts,
    streamed,
)

from scripts.shared.serving import Server, serve
from sglang_ext import compat
from sglang_ext.drafts.noise import murmur_hash32

pytestmark = pytest.mark.xdist_group("drafts")

NEW_TOKENS, SAMPLED_TOKENS = 80, 48
PROMPTS = random_prompts([30, 60, 99, 101, 150, 300, 700])


INLINE = pytest.param((SMALL_INLINE, STRICT_POOL), id="inline")
CACHE_RANK = pytest.param((SMALL_CACHE_RANK, STRICT), id="cache rank", marks=pytest.mark.releases)

inline = pytest.mark.parametrize("drafting_server", [INLINE], indirect=True)
"""What happens is the same with a cache rank."""


@pytest.fixture(scope="module", params=[INLINE, CACHE_RANK])
def drafting_server(
    request: pytest.FixtureRequest, random_model: Callable[..., Path], cache_home: Path
) -> Iterator[Server]:
    """Drafts attend to 52 tokens: many of them are wrong."""
    placement, strict = request.param
    flags = [*placement, *REUSE, "--model-path", str(random_model()), "--sparse-budget", "40"]
    flags += ["--speculative-algorithm", "CACHE_RANK"]
    if compat.HAS_GRAMMARS_ON_CPUS:
        flags += ["--grammar-backend", "xgrammar"]
    with serve(flags, {"XDG_CACHE_HOME": str(cache_home), **strict}) as server:
        yield server


@pytest.fixture(autouse=True)
def _empty_tree(drafting_server: Server) -> None:
    drafting_server.flush_cache()


def test_greedy_answers_equal_plain_sglang(drafting_server: Server, plain_server: Server) -> None:
    """Prompts of several chunks among them; the second time they are found in the radix cache."""
    rounds = confirmed = 0
    for prompts in (PROMPTS, PROMPTS[-1:]):
        expected = plain_server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
        for _ in range(2):
            answers = drafting_server.generate_all(prompts, NEW_TOKENS, return_logprob=True)
            assert_same_answers(answers, expected, tolerance=1e-4)
        for answer in answers:
            rounds += answer["meta_info"]["spec_verify_ct"]
            confirmed += answer["meta_info"]["spec_num_correct_drafts"]
    assert rounds < confirmed < 7 * rounds  # of eight in a round, some are wrong


def test_the_radix_cache_keeps_whole_answers(drafting_server: Server) -> None:
    (prompt,) = random_prompts([200], seed=14)
    answer = drafting_server.generate(prompt, NEW_TOKENS)
    assert answer["meta_info"]["cache_rank"]["sparse_steps"] > 0
    text = prompt + answer["output_ids"]
    # The last token's K and V are not computed, and one is left to be.
    assert drafting_server.generate(text, 5)["meta_info"]["cached_tokens"] >= len(text) - 2


@inline
def test_top_log_probabilities_and_biases_equal_plain_sglang(
    drafting_server: Server, plain_server: Server
) -> None:
    (prompt,) = random_prompts([200], seed=3)
    options = {
        "return_logprob": True,
        "top_logprobs_num": 4,
        "token_ids_logprob": [7, 9],
        "sampling_params": {"logit_bias": {str(token): -2.0 for token in range(0, 300, 2)}},
    }
    found, plain = (
        server.generate(prompt, NEW_TOKENS, **options)["meta_info"]
        for server in (drafting_server, plain_server)
    )
    for name in ("output_top_logprobs", "output_token_ids_logprobs"):
        for ours, theirs in zip(found[name], plain[name], strict=True):
            assert [token for _, token, *_ in ours] == [token for _, token, *_ in theirs]
            assert difference([p for p, *_ in ours], [p for p, *_ in theirs]) < 1e-4


def test_sampled_answers_are_draws_of_plain_sglang_with_the_same_noise(
    drafting_server: Server,
    plain_server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain SGLang tells the distributions of the text; noise is of the seed and the position."""
    sampling = {"temperature": 1.0}
    if drafting_server.cache_rank().get("placement") != "inline":
        sampling = {"temperature": 1.2, "top_k": 20, "top_p": 0.95}
    monkeypatch.setattr("sglang.srt.layers.sampler.murmur_hash32", murmur_hash32)
    (prompt,) = random_prompts([250], seed=4)
    seed = 2**40 + 7
    parameters = {**sampling, "sampling_seed": seed}
    answer = drafting_server.generate(prompt, SAMPLED_TOKENS, sampling_params=parameters)
    tokens = answer["output_ids"]
    again = drafting_server.generate(prompt, SAMPLED_TOKENS, sampling_params=parameters)
    assert again["output_ids"] == tokens
    assert 3 < answer["meta_info"]["spec_verify_ct"] < SAMPLED_TOKENS
    drawn = [
        draw_as_plain(each, seed, position, sampling)
        for position, each in enumerate(
            distributions(plain_server, prompt, tokens), start=len(prompt) - 1
        )
    ]
    # One step of rounding in a hash of 32 bits may turn a draw.
    assert sum(one != other for one, other in zip(drawn, tokens, strict=True)) <= 1


def distributions(server: Server, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities before each token of an answer: (tokens, vocabulary)."""
    body = {
        "input_ids": prompt + tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        "token_ids_logprob": list(range(VOCABULARY)),
    }
    answer = server.post("/generate", body).json()
    entries = answer["meta_info"]["input_token_ids_logprobs"][1:]
    found = torch.full((len(tokens), VOCABULARY), -float("inf"))
    for row, of_position in zip(found, entries, strict=True):
        for logprob, token, *_ in of_position:
            row[token] = logprob
    return found


@torch.compiler.set_stance("force_eager")
def draw_as_plain(
    logprobs: torch.Tensor, seed: int, position: int, sampling: dict[str, float]
) -> int:
    """Draw a token by SGLang's sampler of PyTorch."""
    probabilities = torch.softmax(logprobs[None] / sampling["temperature"], dim=-1)
    of_row = torch.tensor([seed]), torch.tensor([position])
    if len(sampling) == 1:
        return int(sampling_from_probs_torch(probabilities, *of_row))
    bounds = (
        torch.tensor([sampling.get("top_k", VOCABULARY)]),
        torch.tensor([sampling.get("top_p", 1.0)]),
        torch.zeros(1),
    )
    return int(top_k_top_p_min_p_sampling_from_probs_torch(probabilities, *bounds, False, *of_row))


@inline
def test_answers_follow_their_distribution(drafting_server: Server, plain_server: Server) -> None:
    """Chi-square over answers of three tokens out of three, without seeds."""
    (prompt,), allowed, samples = random_prompts([120], seed=5), [7, 99, 250], 600
    bias = {str(token): -1000.0 for token in range(VOCABULARY) if token not in allowed}
    # At this temperature all answers are likely.
    sampling = {"temperature": 3.0, "logit_bias": bias}
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(samples // 300):
        answers = drafting_server.generate_all([prompt] * 300, 3, sampling_params=sampling)
        counts.update(tuple(answer["output_ids"]) for answer in answers)

    outcomes = list(itertools.product(allowed, repeat=3))
    expected = torch.zeros(len(outcomes))
    for first in range(0, len(outcomes), len(allowed)):  # the last token is behind the same two
        logprobs = distributions(plain_server, prompt, list(outcomes[first]))[:, allowed] / 3.0
        shares = logprobs.softmax(-1)
        for place, tokens in enumerate(outcomes[first : first + len(allowed)]):
            chosen = torch.tensor([allowed.index(token) for token in tokens])
            expected[first + place] = shares[torch.arange(3), chosen].prod() * samples
    seen = torch.tensor([float(counts[tokens]) for tokens in outcomes])
    assert seen.sum() == samples
    likely = expected >= 5
    expected = torch.cat([expected[likely], expected[~likely].sum()[None]])
    seen = torch.cat([seen[likely], seen[~likely].sum()[None]])
    assert len(seen) > 20
    statistic, freedom = float(((seen - expected) ** 2 / expected).sum()), len(seen) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@inline
@pytest.mark.parametrize("kind", ["frequency", "presence"])
def test_what_depends_on_all_tokens_before_is_decoded_without_drafts(
    drafting_server: Server, plain_server: Server, kind: str
) -> None:
    """Plain SGLang penalizes a token late where steps overlap, so it only tells distributions."""
    (prompt,) = random_prompts([150], seed=6)
    parameters = {f"{kind}_penalty": 1.5}
    answer = drafting_server.generate(prompt, NEW_TOKENS, sampling_params=parameters)
    assert answer["meta_info"]["spec_num_correct_drafts"] == 0
    counts, tokens = torch.zeros(VOCABULARY), answer["output_ids"]
    for logprobs, token in zip(distributions(plain_server, prompt, tokens), tokens, strict=True):
        penalty = counts if kind == "frequency" else counts.clamp(max=1)
        assert int((logprobs - 1.5 * penalty).argmax()) == token
        counts[token] += 1


def test_drafts_go_on_where_there_were_none_for_a_while(
    drafting_server: Server, plain_server: Server
) -> None:
    """A request with a penalty decodes beside, for which all of the batch has no drafts."""
    prompt, beside = random_prompts([200, 60], seed=15)
    expected = plain_server.generate(prompt, 300)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(drafting_server.generate, prompt, 300)
        drafting_server.wait_for(30, sparse_requests=1)
        short = drafting_server.generate(beside, 20, sampling_params={"frequency_penalty": 1.5})
        found = answer.result()
    assert short["meta_info"]["spec_num_correct_drafts"] == 0
    assert found["output_ids"] == expected["output_ids"]
    assert found["meta_info"]["cache_rank"]["dense_reason"] is None
    assert found["meta_info"]["spec_num_correct_drafts"] > 60


@inline
def test_stops_within_a_round_end_an_answer_there(
    drafting_server: Server, plain_server: Server
) -> None:
    (prompt,) = random_prompts([180], seed=7)
    text = plain_server.generate(prompt, NEW_TOKENS)["output_ids"]
    for stop in text[20:40:5]:
        options = {"sampling_params": {"stop_token_ids": [stop], "ignore_eos": False}}
        found, plain = (
            server.generate(prompt, NEW_TOKENS, **options)
            for server in (drafting_server, plain_server)
        )
        assert found["output_ids"] == plain["output_ids"]
        assert found["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]
        assert found["meta_info"]["finish_reason"]["type"] == "stop"
        assert found["meta_info"]["cache_rank"]["sparse_steps"] > 0


@inline
@pytest.mark.parametrize("length", [40, 80])
def test_rounds_without_drafts_have_several_tokens(
    drafting_server: Server, plain_server: Server, length: int
) -> None:
    """The longer prompt comes to drafts in the middle of its answer, and both may stop early."""
    (prompt,) = random_prompts([length], seed=13)
    plain = plain_server.generate(prompt, 50)
    found = drafting_server.generate(prompt, 50)
    assert found["output_ids"] == plain["output_ids"]
    if length == 40:
        assert found["meta_info"]["cache_rank"]["dense_reason"] == "below_threshold"
        assert found["meta_info"]["spec_verify_ct"] == 13  # 49 tokens behind the prefill's
    else:
        assert found["meta_info"]["cache_rank"]["sparse_steps"] > 0
    for stop in plain["output_ids"][8:14]:
        options = {"sampling_params": {"stop_token_ids": [stop], "ignore_eos": False}}
        found, expected = (
            server.generate(prompt, 50, **options) for server in (drafting_server, plain_server)
        )
        assert found["output_ids"] == expected["output_ids"]


@inline
def test_a_stream_reports_as_much_as_an_answer(drafting_server: Server) -> None:
    (prompt,) = random_prompts([210], seed=8)
    whole = drafting_server.generate(prompt, NEW_TOKENS)
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True},
    }
    chunks = list(streamed(drafting_server, body))
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["meta_info"]["cache_rank"] == whole["meta_info"]["cache_rank"]
    assert len(chunks) < NEW_TOKENS  # several tokens come at once


def test_requests_that_wait_for_room_or_are_aborted_leave_nothing(
    drafting_server: Server, plain_server: Server
) -> None:
    free = drafting_server.cache_rank()["pool_free_tokens"]
    prompts = random_prompts([330] * 8, seed=9)  # 8 · 390 tokens, and there is room for 2500
    expected = plain_server.generate_all(prompts, 60)
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(drafting_server.generate, prompts[0], 400, rid="to be aborted")
        answers = drafting_server.generate_all(prompts, 60)
        drafting_server.post("/abort_request", {"rid": "to be aborted"})
        lost.result()
    for answer, plain in zip(answers, expected, strict=True):
        assert answer["output_ids"] == plain["output_ids"]
    state = drafting_server.wait_for(10, sparse_requests=0)
    assert state["pool_free_tokens"] == free


def test_a_request_reaches_the_end_of_the_context_beside_others(
    drafting_server: Server, plain_server: Server
) -> None:
    """SGLang takes rows for drafts behind it; none is another request's."""
    prompts = random_prompts([1990, 60, 50], seed=10)
    expected = [plain_server.generate(prompt, 50) for prompt in prompts]
    with ThreadPoolExecutor() as pool:
        answers = [*pool.map(lambda prompt: drafting_server.generate(prompt, 50), prompts)]
    for answer, plain in zip(answers, expected, strict=True):
        assert answer["output_ids"] == plain["output_ids"]


@inline
def test_several_samples_of_a_prompt_differ(drafting_server: Server) -> None:
    (prompt,) = random_prompts([150], seed=11)
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 40, "temperature": 1.0, "n": 3, "ignore_eos": True},
    }
    answers = drafting_server.post("/generate", body).json()
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3


@pytest.mark.skipif(not compat.HAS_GRAMMARS_ON_CPUS, reason="this release has none on CPUs")
def test_the_server_says_how_many_drafts_are_right(drafting_server: Server) -> None:
    drafting_server.generate(random_prompts([150], seed=12)[0], 60)
    drafts = drafting_server.cache_rank()["drafts"]
    assert drafts["most"] == 8
    assert drafts["rounds"] > 0
    assert 0 < drafts["right"] < 1
