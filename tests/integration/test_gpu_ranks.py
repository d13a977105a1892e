"""Two ranks on two GPUs: captured graphs, overlap schedule, several groups, a lost rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from workload import random_prompts

from scripts.pointer_chase import make_chain
from scripts.serving import Server, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(600),
]

GPU_FLAGS = (
    "--dtype bfloat16 --attention-backend fa3 --cuda-graph-backend-prefill disabled "
    "--cuda-graph-bs-decode 1 2 4 8 --max-running-requests 16 --max-total-tokens 100000 "
    "--sampling-backend pytorch --grammar-backend none"
).split()
CHAIN_FLAGS = (
    "--sparse-threshold 264 --sparse-budget 40 --sink-tokens 4 --recent-tokens 16 "
    "--selection-margin 8 --delta-capacity 40 --recall-interval 4"
).split()
CHAINS = [make_chain(seed=seed, facts=128, hops=80) for seed in range(8)]


@pytest.fixture(scope="module")
def chain_server() -> Iterator[Server]:
    with serve([*GPU_FLAGS, *CHAIN_FLAGS]) as server:
        yield server


def walk(server: Server, chains: list[Any]) -> list[tuple[int, dict[str, int]]]:
    """Correct hops and statistics of chains that decode together."""

    def one(chain: Any) -> tuple[int, dict[str, int]]:
        sampling = {"temperature": 0, "max_new_tokens": chain.max_tokens}
        body = {"text": chain.prompt, "sampling_params": sampling}
        response = server.post("/generate", body).json()
        grade = chain.grade(response["text"])
        return grade.correct_hops, response["meta_info"]["cache_rank"]

    with ThreadPoolExecutor(len(chains)) as pool:
        return list(pool.map(one, chains))


def state(server: Server) -> dict[str, Any]:
    info = requests.get(f"{server.url}/server_info", timeout=30).json()
    return dict(info["internal_states"][0]["cache_rank"])


def test_sparse_chains_are_exact_alone_and_together(chain_server: Server) -> None:
    for chains in (CHAINS[:1], CHAINS):
        for hops, statistics in walk(chain_server, chains):
            assert hops == 80
            assert statistics["sparse_steps"] > 200


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_every_request_finishes_when_the_cache_rank_is_lost(
    chain_server: Server, sent: signal.Signals
) -> None:
    deadline = time.monotonic() + 60
    while not state(chain_server)["up"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    pid = state(chain_server)["pid"]
    killer = threading.Timer(0.3, os.kill, (pid, sent))
    killer.start()
    results = walk(chain_server, CHAINS)
    killer.join()
    # A step under way keeps its last selection, which may cost the hop that it computes.
    assert min(hops for hops, _ in results) >= 78


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers with random weights, in bfloat16, of a head size that every kernel build has."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("deep")
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("inference_kv", ["full", "working-set"])
@pytest.mark.parametrize("checksum", ["1", "0"])
def test_slots_equal_the_mirror_over_many_groups(
    deep_model: Path, inference_kv: str, checksum: str
) -> None:
    """With checksums every step is compared; without, the host runs ahead as it does in use."""
    flags = (
        f"--model-path {deep_model} --skip-tokenizer-init --layers-per-group 1 "
        f"--dense-layers 0 --inference-kv {inference_kv} --sparse-threshold 1024 "
        "--sparse-budget 512 --recent-tokens 32 --delta-capacity 64 --bulk-chunk-tokens 256"
    ).split()
    environment = {"CACHE_RANK_CHECKSUM": checksum}
    with serve([*GPU_FLAGS, *flags], environment) as server:
        responses = server.generate_all(random_prompts([3000, 700, 1500, 4000]), 600)
        steps = [response["meta_info"]["cache_rank"]["sparse_steps"] for response in responses]
        after = state(server)
    assert min(steps) > 100, steps
    assert after["starts"] == 1
    assert after["up"]
