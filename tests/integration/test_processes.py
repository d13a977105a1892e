"""Processes come and go together."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from waiting import wait_until
from workload import SMALL_CACHE_RANK, random_prompts

from scripts.shared.serving import Server


def processes_of(server: Server) -> list[psutil.Process]:
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert int(server.cache_rank()["pid"]) in {process.pid for process in processes}
    return processes


def assert_it_has_stopped(server: Server, processes: list[psutil.Process], logged: int) -> None:
    """Nothing is left of a server whose log had so many bytes when it was to stop."""
    assert server.process.wait(timeout=30) == 0, server.tail()
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []
    said = server.log.read_bytes()[logged:].decode(errors="replace")
    assert not re.search("crashed|Traceback|SIGQUIT|was lost", said), said


@pytest.mark.serial
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_an_idle_server_stops_and_leaves_no_process(number: int) -> None:
    running = Server(["--cache-rank-gpus", "1"])
    try:
        running.wait_ready()
        processes, logged = processes_of(running), running.log.stat().st_size
        running.process.send_signal(number)
        assert_it_has_stopped(running, processes, logged)
    finally:
        running.stop()


@pytest.mark.serial
@pytest.mark.parametrize(
    ("number", "times", "to_all", "reason"),
    [
        (signal.SIGINT, 1, True, "abort"),
        pytest.param(signal.SIGINT, 2, True, "abort", marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, 1, True, "length", marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, 1, False, "length", marks=pytest.mark.thorough),
        pytest.param(signal.SIGTERM, 2, False, "abort", marks=pytest.mark.thorough),
    ],
)
def test_a_server_stops_while_streams_run(
    random_model: Callable[..., Path], number: int, times: int, to_all: bool, reason: str
) -> None:
    flags = [*SMALL_CACHE_RANK, "--skip-tokenizer-init", "--sparse-threshold", "100"]
    flags += ["--sparse-budget", "24", "--max-swap-tokens", "24"]
    running = Server([*flags, "--model-path", str(random_model())])
    ends: list[Any] = []
    tokens = 1800 if reason == "abort" else 300
    try:
        running.wait_ready()
        threads = [
            threading.Thread(
                target=lambda prompt=prompt: ends.append(last_event(running, prompt, tokens))
            )
            for prompt in random_prompts([150] * 4, seed=1)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: running.cache_rank()["sparse_requests"] == len(threads))
        processes, logged = processes_of(running), running.log.stat().st_size
        for _ in range(times):
            # The server is the first process of its group, as a shell's child is in a terminal.
            (os.killpg if to_all else os.kill)(running.process.pid, number)
            time.sleep(0.5)
        assert_it_has_stopped(running, processes, logged)
        for thread in threads:
            thread.join()
        assert [end["meta_info"]["finish_reason"]["type"] for end in ends] == [reason] * 4
    finally:
        running.stop()


def last_event(server: Server, prompt: list[int], tokens: int) -> Any:
    """The last that a stream says before it ends as streams do."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    url = f"{server.url}/generate"
    with requests.post(url, json=body, stream=True, timeout=120) as response:
        *_, event, done = (line for line in response.iter_lines() if line)
    assert done == b"data: [DONE]"
    return json.loads(event.removeprefix(b"data: "))


@pytest.mark.serial
@pytest.mark.thorough
def test_a_dead_scheduler_takes_its_cache_rank_with_it() -> None:
    running = Server(["--cache-rank-gpus", "1"])
    try:
        running.wait_ready()
        cache_rank = psutil.Process(int(running.cache_rank()["pid"]))
        psutil.Process(cache_rank.ppid()).kill()
        cache_rank.wait(timeout=20)
        assert running.process.wait(timeout=60) != 0
    finally:
        running.stop()


ENGINE_SCRIPT = """
from safetensors.torch import load_file

from sglang_ext import Engine, compat
from sglang_ext.server_args import BUNDLED_MODEL

if __name__ == "__main__":
    engine = Engine(sparse_threshold=100, sparse_budget=32, sink_tokens=4, recent_tokens=8,
                    max_swap_tokens=32, skip_tokenizer_init=True)

    def generate():
        return engine.generate(
            input_ids=list(range(5, 125)),
            sampling_params={"max_new_tokens": 40, "temperature": 0, "ignore_eos": True},
        )

    first = generate()
    print("sparse steps:", first["meta_info"]["cache_rank"]["sparse_steps"])
    # With the least likely token in place of the most likely one.
    name = "model.norm.weight"
    weights = load_file(BUNDLED_MODEL / "model.safetensors")[name]
    for factor in (-1, 1):
        compat.load_weights(engine, [(name, factor * weights)])
        print("same tokens:", generate()["output_ids"] == first["output_ids"])
    engine.shutdown()
"""


def test_the_engine_runs_in_process(tmp_path: Any) -> None:
    script = tmp_path / "use_engine.py"
    script.write_text(ENGINE_SCRIPT)
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False
    )
    found = re.search(r"sparse steps: (\d+)", result.stdout)
    assert found, (result.stdout[-2000:], result.stderr[-4000:])
    assert 10 < int(found[1]) < 40  # of 40, some while its prompt is shipped and slots are filled
    # Other weights are loaded, and those before.
    assert re.findall(r"same tokens: (\w+)", result.stdout) == ["False", "True"]
