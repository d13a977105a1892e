"""When SGLang loads other weights, nothing of the old ones is reused, and forecasts are by the new.

When SGLang releases memory, the cache rank has none, and comes back with it.
"""

from __future__ import annotations

import base64
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from waiting import wait_until
from workload import (
    DENSE,
    SMALL_CACHE_RANK,
    SMALL_INLINE,
    STRICT,
    STRICT_POOL,
    assert_same_answers,
    cached,
    copy_model,
    difference,
    log_probabilities,
    negated_queries,
    random_prompts,
)

from cache_rank.measure.recording import RECORD_VARIABLE
from cache_rank.pages import PAGE_TOKENS
from scripts.shared.recordings import read_events
from scripts.shared.serving import Server, serve

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group(name="weight-updates")]

FLAGS = "--skip-tokenizer-init --sparse-threshold 100 --sparse-budget 24".split()

CACHE_RANK = [
    *SMALL_CACHE_RANK,
    *"--max-swap-tokens 24 --query-predictor forecast --forecast-lead 1".split(),
    *("--cache-rank-config", '{"layers_per_group":1}'),
]

AT_A_TIME = 4


def test_new_weights_reach_the_cache_rank(
    random_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = random_model("qwen3", 4)
    other = copy_model(model, tmp_path / "other", negated_queries(model))
    recorded = tmp_path / "recorded"
    flags = [*CACHE_RANK, *FLAGS, "--model-path", str(model)]
    (prompt,) = random_prompts([140])
    with serve(flags, {RECORD_VARIABLE: str(recorded)}) as server:
        before = server.generate(prompt, 40)["output_ids"]
        server.wait_for(10, sequences=0)  # SGLang refuses while a step is under way
        answer = server.post("/update_weights_from_disk", {"model_path": str(other)})
        assert answer.json()["success"], answer.text
        after = server.generate(prompt, 40)
        assert after["meta_info"]["cache_rank"]["sparse_steps"] > 20
        assert after["output_ids"] != before
        assert after["meta_info"]["cached_tokens"] == 0  # its prefix is in no tree any more
        assert server.cache_rank()["starts"] == 1
    events = [e for e in read_events(recorded) if e["kind"] == "projection"]
    forecast = [1, 2]  # of three sparse layers, the first is served by the last step's queries
    assert [event["layer"] for event in events] == forecast * 2
    for first, second in zip(events[:2], events[2:], strict=True):
        torch.testing.assert_close(second["projection"][:-2], -first["projection"][:-2])
        assert torch.equal(second["projection"][-1], first["projection"][-1])


# What loops of reinforcement learning call between steps.


WITH_A_CACHE_RANK = pytest.param("cache rank", marks=pytest.mark.releases)
with_a_cache_rank = pytest.mark.parametrize("placement", [WITH_A_CACHE_RANK], indirect=True)


@pytest.fixture(scope="module", params=[WITH_A_CACHE_RANK, "inline"])
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(placement: str, random_model: Callable[..., Path], cache_home: Path) -> Iterator[Server]:
    flags, environment = CACHE_RANK, STRICT
    if placement == "inline":
        flags = [*SMALL_INLINE, "--max-total-tokens", "20000"]
        environment = {**STRICT_POOL, "XDG_CACHE_HOME": str(cache_home)}
    flags = [*flags, *FLAGS, "--model-path", str(random_model("qwen3", 4))]
    with serve([*flags, "--max-running-requests", str(AT_A_TIME)], environment) as running:
        yield running


class Trainer:
    """Changes what two layers make of their input, and with it K and V of all layers behind."""

    def __init__(self, server: Server, model: Path, folder: Path) -> None:
        self._server, self._model, self._folder = server, model, folder
        self._weights = load_file(model / "model.safetensors")

    def weights(self, factor: float) -> dict[str, torch.Tensor]:
        names = [f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (0, 2)]
        return {name: factor * self._weights[name] for name in names}

    def update_from_tensor(self, factor: float, **options: Any) -> Any:
        from sglang.srt.utils import MultiprocessingSerializer

        torch.multiprocessing.set_sharing_strategy("file_system")
        packed = MultiprocessingSerializer.serialize(list(self.weights(factor).items()))
        body = {"serialized_named_tensors": [base64.b64encode(packed).decode()], **options}
        with self._session():
            return self._server.post("/update_weights_from_tensor", body)

    def update_from_disk(self, factor: float, **options: Any) -> Any:
        folder = copy_model(self._model, self._folder, self.weights(factor))
        body = {"model_path": str(folder), **options}
        return self._server.post("/update_weights_from_disk", body)

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Weights are sent between two calls, which SGLang 0.5.23 has."""
        begun = self._server.post("/begin_weight_update")
        yield
        if begun.status_code != 404:
            for answer in (begun, self._server.post("/end_weight_update")):
                assert answer.json()["success"], answer.text


@pytest.fixture(scope="module")
def trainer(
    server: Server, random_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Trainer:
    return Trainer(server, random_model("qwen3", 4), tmp_path_factory.mktemp("update"))


@pytest.mark.parametrize(
    ("source", "flushes"), [("tensor", True), ("tensor", False), ("disk", False)]
)
def test_a_prefix_of_old_weights_is_not_reused(
    server: Server, placement: str, trainer: Trainer, source: str, flushes: bool
) -> None:
    update = getattr(trainer, f"update_from_{source}")
    (prompt,) = random_prompts([700], seed=8)
    for factor in (0.5, 2.0, 1.0):
        old = server.generate(prompt, 30, return_logprob=True)
        again = server.generate(prompt, 30, return_logprob=True)
        assert again["meta_info"]["cached_tokens"] == len(prompt) - 1
        adopted = server.cache_rank().get("tokens_adopted")
        answer = update(factor, flush_cache=flushes)
        assert answer.json()["success"], answer.text
        new = server.generate(prompt, 30, return_logprob=True)
        assert new["meta_info"]["cached_tokens"] == 0
        assert server.cache_rank().get("tokens_adopted") == adopted
        assert difference(log_probabilities(new), log_probabilities(old)) > 1e-3
        server.flush_cache()
        fresh = server.generate(prompt, 30, return_logprob=True)
        assert_same_answers([new], [fresh])
    if placement == "cache rank":
        state = server.cache_rank()
        assert state["starts"] == 1
        assert state["refused_messages"] == 0


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_what_is_prefilled_by_new_weights_attends_to_nothing_of_old_ones(
    server: Server, placement: str, trainer: Trainer, mode: str
) -> None:
    assert trainer.update_from_tensor(1.0).json()["success"]
    prompts = random_prompts([300] * (AT_A_TIME + 2), seed=15)
    server.generate_all(prompts, 1)  # all of them are known by the old weights
    sampling = {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}
    dense = sampling | DENSE["sampling_params"]
    body = {"input_ids": prompts, "sampling_params": [sampling] + [dense] * (len(prompts) - 1)}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, "/generate", {**body, "return_logprob": True})
        wait_until(lambda: server.cache_rank()["sparse_requests"] > 0)
        server.post("/pause_generation", {"mode": mode}).raise_for_status()
        assert trainer.update_from_tensor(0.5, flush_cache=False).json()["success"]
        server.post("/continue_generation").raise_for_status()
    responses = asked.result().json()
    assert responses[0]["meta_info"]["cache_rank"]["sparse_steps"] > 50
    state = server.wait_for(10, sparse_requests=0)
    if placement == "cache rank":
        state = server.wait_for(10, sequences=0)
        assert state["tokens_held"] == state["tokens_kept"]
        assert state["starts"] == 1
    known = [cached(server.generate(prompt, 1)) > 0 for prompt in prompts]
    # Those that went on in place have keys and values of both weights.
    assert known == [mode == "retract"] * AT_A_TIME + [True] * 2
    server.flush_cache()
    if placement == "cache rank":
        server.wait_for(10, tokens_held=0)
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        assert len(response["output_ids"]) == 300
        if index == 0:  # it was sparse
            continue
        differences = differences_by_todays_weights(server, prompt, response)
        was_queued = index >= AT_A_TIME
        if was_queued:
            assert cached(response) == 0
            assert max(differences) < 1e-4
        else:
            assert max(differences[:5]) > 1e-3
            assert (max(differences[-5:]) < 1e-4) == (mode == "retract")


def test_requests_that_a_pause_aborts_leave_nothing_to_new_weights(
    server: Server, trainer: Trainer
) -> None:
    assert trainer.update_from_tensor(1.0).json()["success"]
    prompts = random_prompts([300] * (AT_A_TIME + 2), seed=16)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(server.generate, prompt, 1000) for prompt in prompts]
        wait_until(lambda: server.cache_rank()["sparse_requests"] == AT_A_TIME)
        server.post("/pause_generation", {"mode": "abort"}).raise_for_status()
        assert trainer.update_from_tensor(0.5, flush_cache=False).json()["success"]
        server.post("/continue_generation").raise_for_status()
        ends = [each.result()["meta_info"]["finish_reason"]["type"] for each in asked]
    assert ends == ["abort"] * len(prompts)
    server.wait_for(10, sparse_requests=0)
    after = [server.generate(prompt, 30, return_logprob=True) for prompt in prompts]
    assert [cached(response) for response in after] == [0] * len(prompts)
    server.flush_cache()
    fresh = [server.generate(prompt, 30, return_logprob=True) for prompt in prompts]
    assert_same_answers(after, fresh)


def differences_by_todays_weights(server: Server, prompt: list[int], response: Any) -> list[float]:
    """How far the log-probability of each token is from what a prefill says of it."""
    tokens = prompt + response["output_ids"]
    forced = server.generate(tokens, 1, return_logprob=True, logprob_start_len=len(prompt) - 1)
    expected = [entry[0] for entry in forced["meta_info"]["input_token_logprobs"][1:]]
    ours = log_probabilities(response)
    return [abs(one - other) for one, other in zip(ours, expected, strict=True)]


def release(server: Server, tags: list[str] | None = None) -> None:
    server.post("/release_memory_occupation", {"tags": tags}).raise_for_status()


def resume(server: Server, tags: list[str] | None = None) -> None:
    server.post("/resume_memory_occupation", {"tags": tags}).raise_for_status()


@with_a_cache_rank
def test_memory_that_is_released_comes_back_without_what_it_held(server: Server) -> None:
    server.flush_cache()
    (prompt,) = random_prompts([700], seed=10)
    sparse = server.generate(prompt, 40, return_logprob=True)
    dense = server.generate(prompt, 40, return_logprob=True, **DENSE)
    before = server.wait_for(10, sequences=0, tokens_kept=2 * PAGE_TOKENS)

    release(server)
    assert not psutil.pid_exists(before["pid"])
    released = server.wait_for(10, tokens_held=0, bytes_held=0, tokens_kept=0)
    assert (released["up"], released["memory_released"]) == (False, True)
    assert server.metrics()["sglang_cache_rank_memory_released"] == 1
    release(server, ["kv_cache"])  # SGLang does not mind
    # Plain SGLang answers, too, where nothing is taken from it; it is dense then.
    while_released = server.generate(prompt, 40, return_logprob=True)
    assert while_released["meta_info"]["cache_rank"]["dense_reason"] == "down"
    assert_same_answers([while_released], [dense])

    resume(server)
    state = server.cache_rank()
    assert (state["up"], state["memory_released"]) == (True, False)
    assert server.metrics()["sglang_cache_rank_memory_released"] == 0
    server.flush_cache()  # of what was computed meanwhile
    again = server.generate(prompt, 40, return_logprob=True)
    assert_same_answers([again], [sparse])
    for name in ("sparse_steps", "tokens_shipped", "stale_steps"):
        assert again["meta_info"]["cache_rank"][name] == sparse["meta_info"]["cache_rank"][name]
    state = server.wait_for(10, sequences=0, tokens_kept=before["tokens_kept"])
    assert state["starts"] == before["starts"] + 1
    for name in ("losses", "failed_starts", "tokens_adopted", "pool_free_tokens"):
        assert state[name] == before[name]


@pytest.mark.parametrize(
    "parts",
    [[["kv_cache", "weights"]], [["kv_cache"], ["weights"]], [["weights"], ["kv_cache"]]],
    ids=str,
)
def test_weights_change_while_memory_is_released(
    server: Server, placement: str, trainer: Trainer, parts: list[list[str]]
) -> None:
    assert trainer.update_from_tensor(1.0).json()["success"]
    (prompt,) = random_prompts([700], seed=11)
    old = server.generate(prompt, 30, return_logprob=True)
    before = server.wait_for(10, sparse_requests=0)
    for tags in parts:
        release(server, tags)
    resume(server, ["weights"])
    assert trainer.update_from_tensor(0.5, flush_cache=False).json()["success"]
    if placement == "cache rank":
        assert not server.cache_rank()["up"]
    resume(server, ["kv_cache"])
    if placement == "cache rank":
        assert server.cache_rank()["up"]
    new = server.generate(prompt, 30, return_logprob=True)
    assert new["meta_info"]["cached_tokens"] == 0
    assert new["meta_info"]["cache_rank"]["sparse_steps"] > 10
    assert server.cache_rank().get("tokens_adopted") == before.get("tokens_adopted")
    assert difference(log_probabilities(new), log_probabilities(old)) > 1e-3
    assert trainer.update_from_tensor(0.5).json()["success"]
    assert_same_answers([server.generate(prompt, 30, return_logprob=True)], [new])
    assert server.cache_rank().get("losses") == before.get("losses")


@with_a_cache_rank
def test_memory_is_released_while_a_lost_cache_rank_starts_again(server: Server) -> None:
    server.flush_cache()
    (prompt,) = random_prompts([700], seed=12)
    expected = server.generate(prompt, 40, return_logprob=True)
    starts = server.cache_rank()["starts"]
    for pause in (0.0, 0.3, 1.0):  # it has been noticed or not, and the next one loads
        server.signal_cache_rank(signal.SIGKILL)
        time.sleep(pause)
        release(server)
        assert not server.cache_rank()["up"]
        resume(server)
        server.wait_for(60, up=True)
        assert_same_answers([server.generate(prompt, 40, return_logprob=True)], [expected])
        server.flush_cache()
    assert server.cache_rank()["starts"] >= starts + 3
