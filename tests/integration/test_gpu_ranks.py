"""Two ranks on two GPUs answer exactly, with several groups and after a rank is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until
from workload import GPU_FLAGS, random_prompts

from scripts.accuracy.pointer_chase import make_chain
from scripts.shared.machine import memory_gib, visible_gpus
from scripts.shared.serving import Server, serve

pytestmark = [pytest.mark.gpu(2, ranks=True), pytest.mark.timeout(600)]

CHAIN_FLAGS = (
    "--sparse-threshold 264 --sparse-budget 40 --sink-tokens 4 --recent-tokens 16 "
    "--hysteresis 8 --max-swap-tokens 40"
).split()
CHAINS = [make_chain(seed=seed, facts=128, hops=80) for seed in range(8)]


@pytest.fixture(scope="module")
def chain_server(gpu_flags: list[str]) -> Iterator[Server]:
    with serve([*gpu_flags, *CHAIN_FLAGS]) as server:
        yield server


def walk(server: Server, chains: list[Any]) -> list[tuple[int, dict[str, Any]]]:
    """Decode chains together, and return the correct hops and the statistics of each."""

    def one(chain: Any) -> tuple[int, dict[str, Any]]:
        sampling = {"temperature": 0, "max_new_tokens": chain.max_tokens}
        body = {"text": chain.prompt, "sampling_params": sampling}
        response = server.post("/generate", body).json()
        grade = chain.grade(response["text"])
        return grade.correct_hops, response["meta_info"]["cache_rank"]

    with ThreadPoolExecutor(len(chains)) as pool:
        return list(pool.map(one, chains))


def test_sparse_chains_are_exact_alone_and_together(chain_server: Server) -> None:
    for chains in (CHAINS[:1], CHAINS):
        for hops, statistics in walk(chain_server, chains):
            assert hops == 80
            assert statistics["sparse_steps"] > 200


@pytest.fixture(scope="module")
def working_set_server(gpu_flags: list[str]) -> Iterator[Server]:
    """The pool of this server has room for less than half of what eight chains come to."""
    flags = [*CHAIN_FLAGS, "--inference-kv", "working-set", "--max-total-tokens", "2000"]
    with serve([*gpu_flags, *flags]) as server:
        yield server


def test_a_dense_layer_keeps_tokens_that_leave_the_pool(working_set_server: Server) -> None:
    for hops, statistics in walk(working_set_server, CHAINS):
        assert hops == 80
        assert statistics["sparse_steps"] > 200


def wait_until_up(server: Server, starts: int = 1) -> dict[str, Any]:
    """Wait until the cache rank was started so often and is up, and return the server's state."""

    def is_up() -> bool:
        found = server.cache_rank()
        return bool(found["up"] and found["starts"] >= starts)

    wait_until(is_up, 60)
    return server.cache_rank()


@contextlib.contextmanager
def lose_while_sparse(
    server: Server, pid: int, sent: signal.Signals, requests_at_least: int
) -> Iterator[None]:
    """Send a cache rank a signal once so many of the requests made inside are sparse."""

    def lose() -> None:
        deadline = time.monotonic() + 60
        while server.cache_rank()["sparse_requests"] < requests_at_least:
            if time.monotonic() > deadline:
                return  # the requests say that nothing was lost
            time.sleep(0.01)
        os.kill(pid, sent)

    loser = threading.Thread(target=lose)
    loser.start()
    try:
        yield
    finally:
        loser.join()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_every_request_finishes_when_the_cache_rank_is_lost(
    chain_server: Server, sent: signal.Signals
) -> None:
    before = wait_until_up(chain_server)
    with lose_while_sparse(chain_server, before["pid"], sent, requests_at_least=4):
        results = walk(chain_server, CHAINS)
    assert sum(statistics["stale_steps"] for _, statistics in results) > 0
    assert sum(statistics["retractions"] for _, statistics in results) > 0, "steps were under way"
    assert [hops for hops, _ in results] == [80] * len(CHAINS)
    wait_until_up(chain_server, before["starts"] + 1)
    ((hops, statistics),) = walk(chain_server, CHAINS[:1])
    assert hops == 80
    assert statistics["sparse_steps"] > 200


def test_requests_whose_tokens_are_lost_with_the_cache_rank_are_recomputed(
    working_set_server: Server,
) -> None:
    before = wait_until_up(working_set_server)
    with lose_while_sparse(working_set_server, before["pid"], signal.SIGKILL, requests_at_least=4):
        results = walk(working_set_server, CHAINS)
    assert sum(statistics["retractions"] for _, statistics in results) > 0
    assert [hops for hops, _ in results] == [80] * len(CHAINS)
    wait_until_up(working_set_server, before["starts"] + 1)
    for hops, statistics in walk(working_set_server, CHAINS):
        assert hops == 80
        assert statistics["sparse_steps"] > 200


POOL_GIB = 0.09
"""What 100,000 tokens of the bundled model take, which has two layers."""

CACHE_RANK_GIB = 10.0
"""The share of a GPU that a cache rank has here is more than this."""


def carried_by(backend: str) -> tuple[str, str]:
    return "--cache-rank-config", json.dumps({"cache_rank_transfer_backend": backend})


@pytest.mark.parametrize("backend", ["peer", "nccl"])
def test_memory_is_released_on_both_gpus_and_comes_back(backend: str) -> None:
    gpus = visible_gpus()[:2]
    saver = ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    flags = [*CHAIN_FLAGS, *saver, *carried_by(backend)]
    with serve([*GPU_FLAGS, *flags]) as server:
        for starts in (1, 2, 3):
            assert wait_until_up(server)["starts"] == starts
            for hops, statistics in walk(server, CHAINS):
                assert hops == 80
                assert statistics["sparse_steps"] > 200
            used = memory_gib(gpus)
            server.post("/release_memory_occupation").raise_for_status()
            released = memory_gib(gpus)
            assert released[0] < used[0] - POOL_GIB
            assert released[1] < used[1] - CACHE_RANK_GIB
            server.post("/resume_memory_occupation").raise_for_status()
        found = server.cache_rank()
        assert (found["up"], found["losses"], found["failed_starts"]) == (True, 0, 0)


def deep_flags(model: Path) -> list[str]:
    return (
        f"--model-path {model} --skip-tokenizer-init --dense-layers 0 "
        "--sparse-threshold 1024 --sparse-budget 512 --recent-tokens 32 --max-swap-tokens 64 "
        '--cache-rank-config {"layers_per_group":1,"bulk_chunk_tokens":256}'
    ).split()


LAST = "--query-predictor last"
FORECAST = "--query-predictor forecast --forecast-lead"


@pytest.mark.parametrize(
    ("backend", "schedule"),
    [("peer", LAST), ("peer", f"{FORECAST} 2"), ("nccl", LAST), ("nccl", f"{FORECAST} 1")],
)
def test_a_cache_rank_of_many_groups_is_lost_and_comes_back(
    deep_model: Path, backend: str, schedule: str
) -> None:
    flags = [*deep_flags(deep_model), *schedule.split(), *carried_by(backend)]
    prompts = random_prompts([3000, 700, 1500, 4000])
    with serve([*GPU_FLAGS, *flags]) as server:
        for starts in (1, 2, 3):
            pid = wait_until_up(server, starts)["pid"]
            with lose_while_sparse(server, pid, signal.SIGKILL, requests_at_least=1):
                responses = server.generate_all(prompts, 300)
            statistics = [response["meta_info"]["cache_rank"] for response in responses]
            assert sum(each["stale_steps"] for each in statistics) > 0
            assert [len(response["output_ids"]) for response in responses] == [300] * 4
        wait_until_up(server, 4)
        responses = server.generate_all(prompts, 300)
        steps = [response["meta_info"]["cache_rank"]["sparse_steps"] for response in responses]
        long = [len(prompt) > 1024 for prompt in prompts]
        assert [count > 50 for count in steps] == long, steps


@pytest.mark.parametrize("inference_kv", ["full", "working-set"])
@pytest.mark.parametrize("schedule", [LAST, f"{FORECAST} 2"])
@pytest.mark.parametrize("checksum", ["1", "0"])
def test_slots_equal_the_slot_map_over_many_groups(
    deep_model: Path, gpu_flags: list[str], inference_kv: str, schedule: str, checksum: str
) -> None:
    """With checksums every step is compared; without, the host runs ahead as it does in use."""
    flags = [*deep_flags(deep_model), *schedule.split()]
    flags += ["--inference-kv", inference_kv]
    environment = {"CACHE_RANK_CHECKSUM": checksum}
    with serve([*gpu_flags, *flags], environment) as server:
        responses = server.generate_all(random_prompts([3000, 700, 1500, 4000]), 600)
        steps = [response["meta_info"]["cache_rank"]["sparse_steps"] for response in responses]
        after = server.cache_rank()
    assert min(steps) > 100, steps
    assert after["starts"] == 1
    assert after["up"]
